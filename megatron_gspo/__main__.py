"""``python -m megatron_gspo COMMAND``: the same as the console command ``megatron-gspo``."""

from megatron_gspo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Checkpoints of Qwen3-30B-A3B's tensors, Hugging Face -> Megatron -> Hugging Face, against copying the files.

The model is the published one cut to `--layers` layers, with random bfloat16 weights, in files of 4 GB as published.
Each turn converts it for one layout and back, with the command that users run, and copies the source's files (`cp`,
flushed to the disk as ours are); the resulting files must be the source's to the byte. Memory is the highest
resident set of any one process of the command, pages of mapped files included.

    OMP_NUM_THREADS=1 python benchmarks/conversion.py --layers 6 --json conversion.json

Where this user may, the page cache is dropped before each command, so that all read the disk, and the program's own
files are read again. Needs four times the checkpoint's size in free disk space; 6 layers are 8.7 GB. mbridge, the peer
on the registry, is not in the table: it builds Transformer Engine's layers only, and without a GPU it stops at
`NameError: name 'TENorm' is not defined`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from benchmarks.common import ROOT, Row, Spread, hardware, ratios, save_rows, say, table, versions
from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import checkpoint_metadata
from megatron_gspo.models import family_of, hugging_face_names, read_config
from megatron_gspo.models.hf_checkpoint import write_checkpoint

MODEL = ROOT / "examples" / "qwen3_moe" / "models" / "Qwen3-30B-A3B"
CONVERT = [sys.executable, "-m", "megatron_gspo.tools.convert"]
SHARD_BYTES = 4_000_000_000
LAYOUTS = {
    "TP 1": [],
    "TP 2, EP 4, PP 2": ["--tp", "2", "--ep", "4", "--pp", "2"],
    "TP 4, EP 8": ["--tp", "4", "--ep", "8"],
}


@dataclass(frozen=True)
class Measured:
    """seconds: of the whole command. peak_bytes: the highest resident set of any one of its processes."""

    seconds: float
    peak_bytes: int


def make_checkpoint(folder: Path, layers: int) -> int:
    """A random checkpoint with the published names, sizes and files; returns its bytes."""
    config = read_config(MODEL) | {"num_hidden_layers": layers}
    config_folder = folder / "config"
    config_folder.mkdir(parents=True)
    (config_folder / "config.json").write_text(json.dumps(config, indent=2))
    family, shape = family_of(config)
    chunks = checkpoint_metadata(family, shape, ParallelConfig()).chunks
    sizes = {name: size for chunk in chunks for name, size in chunk.part.whole_sizes(shape).items()}
    generator = torch.Generator().manual_seed(1)

    def random(name: str) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, sizes[name], dtype=torch.int16, generator=generator).view(torch.bfloat16)

    stream = ((name, random(name)) for name in hugging_face_names(family, shape))
    write_checkpoint(folder / "source", stream, source=config_folder, max_shard_bytes=SHARD_BYTES)
    return sum(file.stat().st_size for file in (folder / "source").glob("*.safetensors"))


def measure(command: list[str]) -> Measured:
    """Run a command to its end, watching the memory of every process that it starts."""
    _drop_caches()
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid, peak in _peaks(process.pid).items():
            peaks[pid] = max(peaks.get(pid, 0), peak)
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return Measured(time.perf_counter() - started, max(peaks.values(), default=0))


def _drop_caches() -> None:
    """Have all files but the programs read from the disk, where this user may; what was written before is there by
    then."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
    subprocess.run([*CONVERT, "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def _peaks(pid: int) -> dict[int, int]:
    """Highest resident set so far, in bytes, of a process and its descendants, as the kernel keeps it."""
    found = {}
    try:
        for process in (parent := psutil.Process(pid), *parent.children(recursive=True)):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM")]
            found[process.pid] = int(kilobytes[0]) << 10 if kilobytes else 0
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        pass
    return found


def convert(*arguments: object) -> Measured:
    return measure([*CONVERT, *map(str, arguments)])


def copy(source: Path, target: Path) -> Measured:
    script = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
    return measure(["bash", "-c", script, "copy", str(source), str(target)])


def turn(folder: Path, flags: list[str], processes: int) -> dict[str, Measured]:
    """One layout: there, back, and a copy; what came back is compared and everything removed."""
    source = folder / "source"
    more = ["--processes", processes]
    taken = {
        "copy": copy(source, folder / "copy"),
        "to-megatron": convert("to-megatron", source, folder / "megatron", *flags, *more),
    }
    shutil.rmtree(folder / "copy")
    taken["to-hf"] = convert("to-hf", folder / "megatron", folder / "back", *more)
    files = [file.name for file in source.glob("*.safetensors")]
    _, different, missing = filecmp.cmpfiles(source, folder / "back", files, shallow=False)
    if different or missing:
        raise SystemExit(f"not the same to the byte: {different + missing}")
    shutil.rmtree(folder / "megatron")
    shutil.rmtree(folder / "back")
    return taken


def rows_of(turns: dict[str, list[dict[str, Measured]]], size: int) -> list[Row]:
    """Speed against the copy, and memory, for each layout and direction."""
    rows = []
    for layout, taken in turns.items():
        for way in ("to-megatron", "to-hf"):
            ours = [size / 1e6 / one[way].seconds for one in taken]
            peer = [size / 1e6 / one["copy"].seconds for one in taken]
            peak = max(one[way].peak_bytes for one in taken) / 2**30
            rows.append(
                Row(
                    "conversion", f"{way}, {layout}", "copying the files", "MB/s", "higher", ratios(ours, peer),
                    Spread.of(ours), Spread.of(peer), target=0.5, note=f"peak of a process: {peak:.2f} GiB",
                )
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="of the model's 48 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="turns a layout (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of a conversion (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    machine = hardware()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        size = make_checkpoint(folder, args.layers)
        say(f"{size / 1e9:.2f} GB in {len(list((folder / 'source').glob('*.safetensors')))} files")
        turns: dict[str, list[dict[str, Measured]]] = {layout: [] for layout in LAYOUTS}
        for _ in range(args.repeats):
            for layout, flags in LAYOUTS.items():
                turns[layout].append(turn(folder, flags, args.processes))
                say(layout, {way: (round(m.seconds, 1), f"{m.peak_bytes / 2**30:.2f} GiB")
                             for way, m in turns[layout][-1].items()})
    rows = rows_of(turns, size)
    print(table(rows))
    for row in rows:
        print(f"{row.name}: {row.note}")
    if args.json:
        raw = {layout: [{way: asdict(m) for way, m in one.items()} for one in taken] for layout, taken in turns.items()}
        save_rows(args.json, rows, day=datetime.date.today().isoformat(), hardware=machine, versions=versions(),
                  layers=args.layers, bytes=size, turns=raw)


if __name__ == "__main__":
    main()

"""The interface to Megatron-Core: the only package that imports ``megatron``.

Importing it applies the upstream corrections of ``megatron_gspo.patches``.
"""

from megatron_gspo.patches import apply_patches

apply_patches()

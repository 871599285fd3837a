# The entrances: `make demo` shows it at work, `make test` proves it. CONTRIBUTING.md says more.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

# Runs the words with the tools of scripts/setup on the path.
ENV := . scripts/env &&
DOC := RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --quiet --locked --workspace --no-deps

demo: ## a real workflow on slow stores: straight, then under surgetank
	demo/run

demo-nodes: ## four nodes on this machine share a slow store: straight, then with an agent on each node
	demo/nodes

test: ## the tests, without those that need servers of others
	scripts/setup test
	$(ENV) scripts/suite

test-servers: ## on real servers: HDFS, MooseFS, GridFS, PostgreSQL, Slurm; SUITES='hdfs slurm' for some of them
	scripts/setup test
	$(ENV) scripts/suite servers $(SUITES)

test-full: ## both with long random searches, the shim under other glibcs, and the demonstration, in a clone with empty caches
	scripts/fresh make test-long

test-long: ## the same in this checkout, with the caches that are there
	scripts/setup test
	$(ENV) scripts/suite full
	demo/run

model: ## 100,000 random operations through mount and shim, as many in the core, and a million in a pool, compared with the reference model
	scripts/setup test
	$(ENV) SURGETANK_MODEL_CASES=112 SURGETANK_MODEL_SEED=$$(date +%s) cargo nextest run --workspace --test integration model_mount::
	$(ENV) SURGETANK_MODEL_CASES=1700 SURGETANK_MODEL_SEED=$$(date +%s) cargo nextest run --workspace -E 'package(surgetank-core) & test(/^model::/)'
	$(ENV) SURGETANK_POOL_SEEDS=2000 cargo nextest run --workspace -E 'package(surgetank-pool) & test(members_under_faults)'
	$(ENV) SURGETANK_POOL_MODEL_CASES=40 SURGETANK_MODEL_SEED=$$(date +%s) cargo nextest run --workspace --test integration pool_model::

crash: ## the crash campaign: 2,000 cases, with another seed each time
	scripts/setup test
	$(ENV) scripts/crash

crash-nodes: ## the crash campaign over nodes: 300 cases of lost, cut and killed nodes, with another seed each time; an hour
	scripts/setup test
	$(ENV) SURGETANK_NODE_CASES=$${CASES:-300} SURGETANK_NODE_SEED=$${SEED:-$$(date +%s)} scripts/suite -- cargo nextest run -p surgetank --no-capture -E 'test(pool_crash)'

fuzz: ## every decoder fuzzed for a minute: disk formats, configuration, sockets
	scripts/setup test
	$(ENV) scripts/fuzz

bench: ## the figures of bench/results/REPORT.md, on this machine; two hours, `bench/run plan all` lists them
	scripts/setup bench
	scripts/setup test
	cargo build --release --locked -p surgetank --bin surgetank --example doorbench --example slowfs
	$(ENV) bench/run all
	$(ENV) bench/run report

docs: ## the documentation as a site (target/docs/site), man pages, and the code's own (target/doc)
	scripts/setup docs
	$(ENV) mdbook build
	cargo run --quiet --locked -p surgetank --bin surgetank -- help --man target/docs/man
	$(DOC)
	@echo 'target/docs/site/index.html'

lint: ## format, clippy, rustdoc, and the house's own rules
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --workspace --features surgetank-core/schedules --test schedules --locked -- -D warnings
	$(DOC)
	cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	scripts/tidy
	scripts/python -m ruff format --check --quiet python
	scripts/python -m ruff check --quiet python
	scripts/python -m mypy

clean: ## what building, testing and the demonstration left in this checkout
	cargo clean
	rm -rf .cache mosaic.png

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

.PHONY: demo demo-nodes docs test test-servers test-full test-long model crash crash-nodes fuzz bench lint clean help

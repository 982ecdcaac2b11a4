# Every target does its own set-up and only what is missing.
.PHONY: quickstart stop test build lint bench bench-storage lock clean

quickstart: ## from a checkout to a command run in a microVM
	@scripts/quickstart.sh

stop: ## the server; sandboxes go on
	@scripts/stop.sh

test: ## all tests, with real microVMs
	@scripts/test.sh

build: ## the Python environment and the Rust binaries
	@scripts/system.sh && scripts/venv.sh && scripts/build.sh

lint: ## static checks
	@scripts/lint.sh

bench: ## measure the service levels of docs/SPECIFICATION.md against the running server
	@.venv/bin/aenv bench

bench-storage: ## disks side by side with qemu-storage-daemon and the raw file; no server needed
	@scripts/bench-storage.sh

lock: ## renew the lock files
	@scripts/lock.sh

clean: ## what building and testing left in the checkout; not the node's own data
	rm -rf .venv build rust/target .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

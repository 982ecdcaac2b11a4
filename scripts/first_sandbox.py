"""Runs a command in a first sandbox through the official E2B SDK and says what to do next."""

import os
import sys
import time

from aenv.api import apikey
from aenv.config import load

COMMAND = "echo \"Hello from Linux $(uname -r), $(nproc) CPU, $(free -m | awk '/Mem/ {print $2}') MiB, user $(whoami)\""


def main() -> int:
    settings = load()
    url = f"http://{settings.api.host}:{settings.api.port}"
    variables = {"E2B_API_KEY": apikey.load(settings.secrets_dir), "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
    os.environ.update(variables)
    from e2b import Sandbox  # reads the variables

    print("\nA first sandbox:")
    started = time.monotonic()
    with Sandbox.create("base", timeout=120) as sandbox:
        print(f"  created {sandbox.sandbox_id} in {time.monotonic() - started:.1f} s")
        print(f"  $ {COMMAND}")
        result = sandbox.commands.run(COMMAND)
        print(f"  {result.stdout.strip()}")
        print(f"  create to output: {time.monotonic() - started:.1f} s")

    print("\nFor the official SDKs (pip install e2b, npm install e2b):\n")
    for name, value in variables.items():
        print(f"export {name}={value}")
    print("\nNext:\n")
    print("  .venv/bin/aenv start base       a shell in a new sandbox")
    print("  .venv/bin/aenv ls               what runs")
    print("  .venv/bin/aenv doctor           what this machine can do")
    print(f"  tail -f {settings.home}/server.log")
    return 0 if result.exit_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

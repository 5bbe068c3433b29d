"""Takes the place of launch/worker.py in sweeps of tests: does what `orders.json` says for its seed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from runlab.config.loading import to_yaml
from runlab.run.files import lock
from runlab.run.job import JOB_VARIABLE, Job


def main() -> int:
    """Run the job of this process; its exit status."""
    environment = {name: text for name, text in os.environ.items() if name != JOB_VARIABLE}
    job, orders = Job.from_environment(), Path("orders.json")
    seed, folder = job.config.seed, Path(job.run_dir)
    order = json.loads(orders.read_text()).get(str(seed)) if orders.exists() else None
    if order == "refuse":
        return 2
    folder.mkdir(parents=True, exist_ok=job.resume)
    if order == "die at once":
        os.kill(os.getpid(), signal.SIGKILL)
    lock(folder)
    (folder / "config.yaml").write_text(to_yaml(job.config))
    ignored = [n for n in (2, 15) if signal.getsignal(n) is signal.SIG_IGN]
    blocked = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    facts = {"job": json.loads(job.to_json()), "environment": environment, "children": dict(os.environ)}
    facts |= {"code": __file__, "signals": [ignored, blocked], "pid": os.getpid()}
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")
    print(f"hello from seed {seed}", flush=True)

    def write(status: str) -> None:
        record = {
            "schema": 1,
            "id": job.run_id,
            "status": status,
            "final_metrics": {"eval/return": 10.0 * seed},
        }
        (folder / "record.json").write_text(json.dumps(record))

    write("running")
    if order in ("wait", "ignore"):
        heard: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: heard.append(n))
        (folder / "ready").touch()
        while not heard or order == "ignore":
            time.sleep(0.01)
        time.sleep(0.3)  # a second copy of the signal would arrive by now
        (folder / "heard").write_text(json.dumps(heard))
        write("interrupted")
        return 128 + heard[0]
    if order == "fail":
        write("failed")
        return 1
    if order == "end early":
        return 0
    write("finished")
    if order == "die at the end":
        os.kill(os.getppid(), signal.SIGKILL)  # which would have written that it has finished
    return 0


if __name__ == "__main__":
    sys.exit(main())

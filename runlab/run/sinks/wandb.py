"""Weights & Biases, through its client, which has its own service process.

Online if a key is configured, else offline. A server that refuses, hangs or dies costs the run at most ten
seconds and no row: rows are in `metrics.jsonl` and in the client's folder, which `wandb sync` uploads.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runlab.config.schema import MOST_IN_TAG, WandbConfig
from runlab.config.texts import first_line
from runlab.run import names
from runlab.run.git.snapshot import remote_url
from runlab.run.manifest import list_checkpoints
from runlab.run.paths import CONFIG, PROJECT
from runlab.run.sinks.sink import RecordingSink, Row, RunFacts

_INIT_TIMEOUT_S = 4.0
_FINISH_TIMEOUT_S = 3.5
_CLOSE_LIMIT_S = 5.0  # if the client's process hangs, which then ignores its own timeouts
_TEARDOWN_LIMIT_S = 1.0  # for the client to forget a service process that was killed
_INTERRUPTED_LIMIT_S = 3.0  # an interrupted run has ten seconds for everything


class WandbSink(RecordingSink):
    """Rows, videos, the configuration and the git state of a run. W&B's own step is `env_steps`.

    A resumed run stays one run of W&B: online, the rows that the server lacks are added; offline, the new
    folder holds the whole run and replaces the folders before it. The variable WANDB_MODE beats `mode`.
    """

    def __init__(self, facts: RunFacts, settings: WandbConfig) -> None:
        super().__init__(facts)
        self._settings = settings
        self._wandb: Any = None  # the client; importing it takes a second
        self._run: Any = None
        self._known_steps = 0
        self._uploaded = False

    def open(self) -> None:
        """Start a run of W&B: online if possible, else offline."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports of the client about itself
        import wandb

        self._wandb = wandb
        wandb.setup(settings=wandb.Settings(silent=True))
        mode = os.environ.get("WANDB_MODE", "").strip().lower() or self._settings.mode
        where = "offline"
        if mode not in ("offline", "dryrun"):
            where = "offline, because no API key is configured (`wandb login` stores one)"
            if wandb.login(prompt=False, verify=False):
                try:
                    self._run = self._init("online")
                    where = str(self._run.url)
                except Exception as error:
                    wandb.teardown()  # the id is in use until then
                    where = f"offline, because {first_line(error)}"
        self._run = self._run or self._init("offline")
        self._known_steps = self._run.step  # once, since the service process is asked for it
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")
        self.facts.notify(f"W&B: {'' if self.facts.resumed_at is None else 'resumed, '}{where}")

    def _init(self, mode: str) -> Any:
        facts, config, settings = self.facts, self.facts.config, self._settings
        tags = [config["algo"]["name"], config["env"]["id"], config["determinism"]["level"], facts.sweep]
        tags = [each if len(each) <= MOST_IN_TAG else _cut(each) for each in filter(None, tags)]
        remote = remote_url(PROJECT)
        # In a sweep of W&B, the server chooses the id and waits for this run.
        agents_id = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        client = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # the run has a snapshot of its own
            disable_code=True,
            git_commit=facts.git.commit,
            git_remote_url=remote,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            use_dot_wandb=False,
        )
        return self._wandb.init(
            mode=mode,
            dir=facts.run_dir,
            id=agents_id or facts.run_id,
            name=names.run_name(config, facts.overrides),
            job_type="train",
            notes=config.get("note"),
            project=settings.project,
            entity=settings.entity,
            group=settings.group or names.experiment_name(config, facts.overrides),
            tags=[*tags, *settings.tags],
            config={**config, "git": {**asdict(facts.git), "remote": remote}, "run_id": facts.run_id},
            resume="allow" if mode == "online" else None,
            settings=client,
        )

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Log a row, unless W&B has it."""
        if row["env_steps"] >= self._known_steps:
            self._run.log(dict(row), step=int(row["env_steps"]))

    def add_video(self, path: Path, env_steps: int) -> None:
        """Log a video beside the row of its step."""
        self.add_row({"env_steps": env_steps, "video": self._wandb.Video(str(path), format="mp4")})

    def close(self, status: str, final_metrics: Row) -> None:
        """Finish the run of W&B within a few seconds; what is not uploaded then stays on disk."""
        run = self._run
        if run is None:
            return
        folder, url = Path(run.dir).parent, None if run.offline else run.url
        # A daemon, so that a hanging client stops neither the run nor the interpreter.
        thread = threading.Thread(target=self._finish, args=(status, final_metrics), daemon=True)
        thread.start()
        thread.join(_INTERRUPTED_LIMIT_S if status == "interrupted" else _CLOSE_LIMIT_S)
        if thread.is_alive():
            _kill_service()
            thread.join(_TEARDOWN_LIMIT_S)  # a later run of this process must not go to the dead service
        command = f"wandb sync {'' if url is None else '--include-online '}{shlex.quote(str(folder))}"
        stored = f"stored offline, upload with: {command}"
        self.facts.notify(f"W&B: {f'all uploaded, {url}' if self._uploaded else stored}")

    def _finish(self, status: str, final_metrics: Row) -> None:
        with contextlib.suppress(Exception):  # the caller prints where the rows are
            self._run.summary.update(dict(final_metrics))
            if self._settings.artifact:
                self._add_policy(self.facts.run_dir)
            self._run.finish(exit_code=0 if status == "finished" else 1)
            self._uploaded = not self._run.offline
        with contextlib.suppress(Exception):
            self._wandb.teardown()  # now, because its exit hook would wait for a hanging client

    def _add_policy(self, run_dir: Path) -> None:
        """Hand the newest checkpoint to W&B, if there is one, with the configuration of its policy."""
        for state in list_checkpoints(run_dir)[-1:]:
            policy = self._wandb.Artifact(f"policy-{self._run.id}", "model")
            for path in (state, state.with_suffix(".json"), run_dir / CONFIG):
                policy.add_file(str(path))
            self._run.log_artifact(policy)


def _cut(tag: str) -> str:
    """A tag that is too long, as that of an environment `package.module:Id-v0`, without its module."""
    return tag.rpartition(":")[2][:MOST_IN_TAG]


def _kill_service() -> None:
    """Kill the client's service process, since its exit hook would wait for a hanging one for ever."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)

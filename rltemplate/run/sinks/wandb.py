"""Weights & Biases as a sink that can neither stop, nor delay, nor disturb a run.

The real client runs in a helper process (this module, run as a script) that gets JSON lines through a
pipe. So the training process never imports it: no random generator, signal handler, exit hook or
standard stream of training is touched, importing it costs the run nothing, every run of a process is a
run of its own, a helper that hangs can be killed, and one whose training process was killed still stores
all that it was sent.

Online where a key is configured, else offline; a server that refuses, hangs or rejects the key also
means offline. The only moment at which the run waits is `close`, and never longer than the time budget.

A run that goes on from a checkpoint stays one run of W&B. The helper finds out up to where W&B has it, adds
what `metrics.jsonl` and the folder of videos hold beyond, and leaves out what comes for the second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.run.lines import to_stderr
from rltemplate.run.paths import WANDB
from rltemplate.run.sinks.registry import Row, rows_so_far, videos_so_far

if TYPE_CHECKING:
    from rltemplate.run.sinks.wandb_files import Part

# Largest wait at the end of a run. The requirement is 10 s over a whole run; the rest is reserve for a
# machine so busy that a wait ends late.
_CLOSE_LIMIT_S = 8.5
# The same for a run that was asked to end and has ten seconds for everything. What is not stored then is
# caught up on when the run goes on.
_INTERRUPTED_LIMIT_S = 3.0
# Part of it that an unfinished attempt to go online must leave for starting again, offline.
_OFFLINE_RESERVE_S = 4.5
# An attempt to go online may take this long in the background (it delays nobody), the client's own limit
# comes first, but it overruns that at times.
_ONLINE_LIMIT_S = 15.0
_INIT_TIMEOUT_S = 6.0
_OFFLINE_LIMIT_S = 60.0  # needs no server; this is for a machine that is very busy
# Uploading what is left, when the run is over. Must end before _CLOSE_LIMIT_S.
_FINISH_TIMEOUT_S = 6.0
# The helper of a killed run may still be uploading when the run goes on; that ends by itself.
_OTHER_HELPER_LIMIT_S = 10.0
_MAX_WAITING = 20_000  # rows that wait for a stalled client, before the oldest are dropped

_MODES = ("auto", "online", "offline")


class WandbSink:
    """Sends rows, videos, the configuration and the git state of a run to W&B.

    `mode`: `auto` (online if a key is configured), `online` (the same, but says so if there is none) or
    `offline`; the environment variable WANDB_MODE, where set, beats it, and `disabled` there turns the
    sink off. `group` is what the runs of a sweep share. `git` (commit, ref, ...) is stored under `git` in
    the configuration. `notify` gets single lines for the user, always in the thread of the caller.
    `resumed_at`: the run `run_id` goes on after so many environment steps.

    `write` and `video` never block. `close` blocks for at most about 9 s. `write` raises RuntimeError
    once the client is dead.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        *,
        project: str,
        config: Mapping[str, Any],
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        job_type: str | None = None,
        mode: str = "auto",
        git: Mapping[str, Any] | None = None,
        notify: Callable[[str], None] | None = None,
        resumed_at: int | None = None,
    ) -> None:
        self._notify = to_stderr if notify is None else notify
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / WANDB
        self._mode = _choose_mode(mode)
        self._spec: dict[str, Any] = {
            "run_dir": str(self._run_dir),
            "run_id": run_id,
            "name": name,
            "project": project,
            "entity": entity,
            "group": group,
            "tags": list(tags),
            "job_type": job_type,
            "config": {**config, "git": dict(git)} if git else dict(config),
            "commit": (git or {}).get("commit"),
            "argv": sys.argv,
            "pid": os.getpid(),
            "resumed_at": resumed_at,
        }
        self._changed = threading.Condition()
        # Everything below is shared with two threads and guarded by `_changed`.
        self._lines: deque[str] = deque(maxlen=_MAX_WAITING)
        self._dropped = 0
        self._notes: list[str] = []
        self._helper: subprocess.Popen[bytes] | None = None
        self._reply: dict[str, Any] | None = None  # the helper's `ready` or `failed`
        self._result: dict[str, Any] | None = None  # the helper's last word
        self._helper_gone = False
        self._close_by: float | None = None
        self._dead: str | None = None
        self._thread: threading.Thread | None = None
        if self._mode != "disabled":
            # Daemons, so that an interpreter which exits without `close` does not wait for them.
            self._thread = threading.Thread(target=self._serve, name="wandb-feeder", daemon=True)
            self._thread.start()

    def write(self, row: Row) -> None:
        """Queue a row. Raises RuntimeError if the client is dead."""
        self._send({"row": dict(row)})

    def video(self, path: Path, env_steps: int) -> None:
        """Queue a video, shown under `video`. The file must stay until the client has copied it."""
        self._send({"video": str(path.absolute()), "env_steps": env_steps})

    def note(self, text: str) -> bool:
        """Notes are for the person at the console."""
        return False

    def close(self, status: str, final_metrics: Row) -> None:
        """Finish the W&B run, within the time budget; what was not uploaded then stays on disk."""
        if self._thread is None:
            return
        limit_s = _INTERRUPTED_LIMIT_S if status == "interrupted" else _CLOSE_LIMIT_S
        with self._changed:
            self._queue({"finish": 0 if status == "finished" else 1, "summary": dict(final_metrics)})
            self._close_by = time.monotonic() + limit_s
            self._changed.notify_all()
        self._thread.join(limit_s)
        with self._changed:
            self._dead = self._dead or "it was closed"
            self._changed.notify_all()
            self._kill_helper()
            self._notes.append(self._last_words())
        self._thread = None
        self._flush_notes()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._flush_notes()
        if self._thread is None:
            return
        with self._changed:
            if self._dead is not None:
                raise RuntimeError(self._dead)
            self._queue(message)
            self._changed.notify_all()

    def _queue(self, message: Mapping[str, Any]) -> None:
        if len(self._lines) == self._lines.maxlen:
            self._dropped += 1
        self._lines.append(json.dumps(message, default=str) + "\n")

    def _flush_notes(self) -> None:
        with self._changed:
            notes, self._notes = self._notes, []
        for note in notes:
            self._notify(note)

    def _last_words(self) -> str:
        upload = (self._reply or {}).get("upload")
        if self._result is not None and self._result.get("uploaded"):
            return f"W&B: all uploaded, {self._result['url']}"
        if upload is None:
            return "W&B: the client did not start in time and stored nothing; metrics.jsonl is complete"
        lost = f"; {self._dropped} rows were dropped" if self._dropped else ""
        return f"W&B: stored offline, upload with: {upload}{lost}"

    # What follows runs in the feeder thread.

    def _serve(self) -> None:
        try:
            if self._mode == "offline" or not self._start_online():
                if not self._start("offline", _OFFLINE_LIMIT_S):
                    raise OSError(self._why_not("the client does not start"))
                assert self._reply is not None
                if self._mode == "offline" or self._spec["resumed_at"] is not None:
                    self._tell(f"W&B: {self._reply['ready']}")
            self._feed()
        except OSError as error:
            with self._changed:
                self._dead = str(error)
                self._changed.notify_all()

    def _start_online(self) -> bool:
        """Whether a helper takes rows (offline too, if there is no key). A failed one is cleared away."""
        before = set(self._folder.glob("run-*"))
        if self._start("online", _ONLINE_LIMIT_S):
            assert self._reply is not None
            self._tell(f"W&B: {self._reply['ready']}")
            return True
        self._tell(f"W&B: offline, because {self._why_not('the server does not answer')}")
        with self._changed:
            self._kill_helper()
        for attempt in set(self._folder.glob("run-*")) - before:
            shutil.rmtree(attempt, ignore_errors=True)  # empty, and `wandb sync` would stumble over it
        return False

    def _why_not(self, otherwise: str) -> str:
        return str((self._reply or {}).get("failed", otherwise))

    def _tell(self, text: str) -> None:
        with self._changed:
            self._notes.append(text)

    def _start(self, mode: str, limit_s: float) -> bool:
        """Start a helper and wait until it is ready to take rows, or has failed, or time is up."""
        self._folder.mkdir(parents=True, exist_ok=True)
        package_root = str(Path(__file__).parents[3])
        path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        environment.pop("WANDB_SERVICE", None)  # of a client in the training process, not for us
        # Its reports about itself go to another server, in vain where there is no network.
        environment.setdefault("WANDB_ERROR_REPORTING", "false")
        with (self._folder / "client.log").open("ab") as log:
            helper = subprocess.Popen(
                # -P: no module that happens to lie in the working directory shadows a library.
                [sys.executable, "-P", "-m", __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=self._run_dir,
                # Ctrl-C in the terminal is for training, which then closes this sink in good order.
                start_new_session=True,
            )
        assert helper.stdin is not None
        wait = self._spec["resumed_at"] is not None and self._helper is None  # or the first one has waited
        self._adopt(helper)
        threading.Thread(target=self._listen, args=(helper,), name="wandb-listener", daemon=True).start()
        spec = {**self._spec, "mode": mode, "wait": wait}
        helper.stdin.write((json.dumps(spec, default=str) + "\n").encode())
        helper.stdin.flush()
        give_up = time.monotonic() + limit_s + (_OTHER_HELPER_LIMIT_S if wait else 0.0)
        with self._changed:
            while self._reply is None and not self._helper_gone and self._dead is None:
                limit = give_up
                if self._close_by is not None:
                    reserve = _OFFLINE_RESERVE_S if mode == "online" else 0.0
                    limit = min(limit, self._close_by - reserve)
                if (left := limit - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
            return self._reply is not None and "ready" in self._reply

    def _adopt(self, helper: subprocess.Popen[bytes]) -> None:
        with self._changed:
            self._helper, self._reply, self._helper_gone = helper, None, False

    def _listen(self, helper: subprocess.Popen[bytes]) -> None:
        """Read what a helper says until it ends (in a thread of its own)."""
        assert helper.stdout is not None
        for line in helper.stdout:
            with contextlib.suppress(json.JSONDecodeError), self._changed:
                said = json.loads(line)
                if helper is self._helper:
                    if "ready" in said or "failed" in said:
                        self._reply = said
                    elif "note" in said:
                        self._notes.append(said["note"])
                    else:
                        self._result = said
                    self._changed.notify_all()
        with self._changed:
            if helper is self._helper:
                self._helper_gone = True
                self._changed.notify_all()

    def _feed(self) -> None:
        assert self._helper is not None
        assert self._helper.stdin is not None
        pipe = self._helper.stdin
        while True:
            with self._changed:
                while not self._lines and not self._helper_gone and self._dead is None:
                    self._changed.wait()
                if self._dead is not None or self._result is not None:
                    return
                if self._helper_gone:
                    raise OSError(f"the W&B client ended by itself, see {self._folder / 'client.log'}")
                batch = list(self._lines)
                self._lines.clear()
            # May block while the client is busy; then rows gather in the queue, not in training.
            with contextlib.suppress(BrokenPipeError):  # then `_listen` says so, and the next turn ends
                pipe.write("".join(batch).encode())
                pipe.flush()

    def _kill_helper(self) -> None:
        if self._helper is not None and self._helper.poll() is None:
            self._helper.kill()  # its service process ends with it, and leaves the log on disk
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._helper.wait(0.5)


def _choose_mode(mode: str) -> str:
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    asked = os.environ.get("WANDB_MODE", "").strip().lower()
    if asked in ("offline", "dryrun"):
        return "offline"
    if asked == "disabled":
        return "disabled"
    return "online" if asked in ("online", "run") else mode


# What follows runs in the helper process.


def _help() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client passes a stop in the web page on as SIGINT
    # The client starts processes that inherit standard streams: they must not keep our pipes open.
    source, replies = os.dup(0), os.dup(1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    lines = _Lines(source)
    spec = json.loads(lines.read() or "{}")
    if not spec:
        return

    def reply(**said: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(replies, (json.dumps(said) + "\n").encode())

    # The client records how the program was called; that is what the user typed, not this helper.
    sys.argv = spec["argv"]
    from rltemplate.run.sinks.wandb_files import Part, parts_of, upload_command

    folder, run_id = Path(spec["run_dir"], WANDB), spec["run_id"]
    goes_on = spec["resumed_at"] is not None
    try:
        _be_alone(folder, run_id, spec["wait"])
        earlier = parts_of(folder, run_id) if goes_on else []
        run, told = _begin(spec)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        reply(failed=f"{first_line} ({type(error).__name__})")
        return
    log = _Log(run, _Position.of(run, earlier) if goes_on else _Position(), lambda text: reply(note=text))
    own = Part(Path(run.settings.sync_file), started=run.start_time)
    # What W&B lacks of earlier parts goes into this one where W&B can be asked what it has.
    stored = [*(part for part in earlier if run.offline and not part.uploaded), own]
    reply(ready=f"goes on with run {run_id}: {told}" if goes_on else told, upload=upload_command(stored))
    if goes_on:
        log.catch_up(Path(spec["run_dir"]), spec["resumed_at"])
        if not run.offline:
            for part in earlier:
                part.mark_uploaded()  # or `wandb sync`, called without folders, would add it to the run again
    exit_code = 1  # if training dies without a word
    while (line := lines.read()) is not None:
        message = json.loads(line)
        if "row" in message:
            log.row(message["row"])
        elif "video" in message:
            log.video(Path(message["video"]), message["env_steps"])
        else:
            exit_code = message["finish"]
            run.summary.update(message["summary"])
            break
    try:
        run.finish(exit_code=exit_code)
        if not run.offline:
            own.mark_uploaded()
        reply(uploaded=not run.offline, url=None if run.offline else run.url)
    except TimeoutError:
        reply(uploaded=False)


def _be_alone(folder: Path, run_id: str, wait: bool) -> None:
    """Hold a lock while this helper or its client lives; `wait` until no other does, but not forever.

    The lock is on standard error, the client's log in the run folder, because the client's own process
    inherits that: it outlives a helper that was killed by some seconds, and writes until then.
    """
    give_up = time.monotonic() + (_OTHER_HELPER_LIMIT_S if wait else 0.0)
    with contextlib.suppress(OSError):  # a file system without locks
        while time.monotonic() < give_up:
            try:
                fcntl.flock(2, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        fcntl.flock(2, fcntl.LOCK_SH | fcntl.LOCK_NB)
    # The name of the client's folder has the second in it, and a clock that went back comes by again.
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(0.1)


def _begin(spec: Mapping[str, Any]) -> tuple[Any, str]:
    """The W&B run, and a few words for the user about where it is."""
    import wandb

    told = "offline"
    online = spec["mode"] == "online"
    if online and not wandb.login(prompt=False, verify=False):
        online, told = False, "offline, because no API key is configured (`wandb login` stores one)"
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,  # the run is recorded by its own snapshot, passed on below
        disable_code=True,
        save_code=False,
        git_commit=spec["commit"],
        program=spec["argv"][0],
        init_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        x_stats_pid=spec["pid"],  # CPU and memory of training, not of this helper
        x_transaction_log_flush_interval=1.0,
        use_dot_wandb=False,
    )
    run = wandb.init(
        mode="online" if online else "offline",
        dir=spec["run_dir"],
        id=spec["run_id"],
        name=spec["name"],
        project=spec["project"],
        entity=spec["entity"],
        group=spec["group"],
        tags=spec["tags"] or None,
        job_type=spec["job_type"],
        config=spec["config"],
        # Offline this is stored: `wandb sync` then adds this part to the run instead of replacing it.
        resume="allow" if online or spec["resumed_at"] is not None else None,
        settings=settings,
    )
    run.define_metric("env_steps")
    run.define_metric("*", step_metric="env_steps")
    return run, f"{run.url}" if online else told


@dataclass
class _Position:
    """Up to where W&B has a run."""

    row: int = -1  # `env_steps` of the last row
    videos: Container[int] = ()  # `env_steps` of each
    next_step: int = 0  # W&B's own

    @classmethod
    def of(cls, run: Any, earlier: Sequence[Part]) -> _Position:
        """Where `run` stands: the server says it; offline, what it will know from the `earlier` parts."""
        if run.offline:
            return cls(
                row=max((part.last_row for part in earlier), default=-1),
                videos={at for part in earlier for at in part.videos},
                next_step=1 + max((part.last_step for part in earlier), default=-1),
            )
        last = run.starting_step - 1
        # The last thing may be a video, which has a step of its own behind that of its row.
        tail = run.summary.get("env_steps") if run.summary.get("_step") == last else None
        row = last if tail is None else int(tail)
        known = {at for part in earlier for at, step in part.videos.items() if step <= last}
        # Where the earlier parts are gone, nobody knows better.
        return cls(row, known if earlier else range(row + 1), run.starting_step)


class _Log:
    """Gives rows and videos to a W&B run, each once.

    W&B's own step is `env_steps`. It must grow with each call, so a video has the step behind its row, and
    in the rare case that a row needs this step too, the row gets the one behind that. The horizontal axis of
    every chart is `env_steps` itself.
    """

    def __init__(self, run: Any, position: _Position, note: Callable[[str], None]) -> None:
        self._run = run
        self._held = position
        self._next_step = position.next_step
        self._note = note

    def catch_up(self, run_dir: Path, resumed_at: int) -> None:
        """Log what W&B lacks of the run so far, which a dead machine or an unfinished upload cut off."""
        rows = {int(row["env_steps"]): row for row in rows_so_far(run_dir)}
        videos = videos_so_far(run_dir)
        for at in sorted({*rows, *videos}):
            if at <= resumed_at and at in rows:
                self.row(rows[at])
            if at <= resumed_at and at in videos:
                self.video(videos[at], at)

    def row(self, row: Row) -> None:
        if row["env_steps"] > self._held.row:
            self._log(row, int(row["env_steps"]))

    def video(self, path: Path, env_steps: int) -> None:
        import wandb

        if env_steps in self._held.videos:
            return
        try:
            video = wandb.Video(str(path), format="mp4")
            self._log({"video": video, "env_steps": env_steps}, env_steps)
        except Exception as error:
            self._note(f"W&B: a video was left out: {error}")

    def _log(self, values: Mapping[str, Any], env_steps: int) -> None:
        step = max(env_steps, self._next_step)
        # Committed at once: otherwise the client holds the last row back until the next.
        self._run.log(dict(values), step=step, commit=True)
        self._next_step = step + 1


class _Lines:
    """Lines from a descriptor; also ends when the parent does, whoever else holds the pipe open.

    Environment workers that were forked from training inherit the writing end of the pipe, so its end
    alone would not tell that training was killed.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parent = os.getppid()
        self._buffer = b""

    def read(self) -> str | None:
        """The next line, or None at the end."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._fd], [], [], 2.0)
            if ready:
                data = os.read(self._fd, 1 << 16)
                if not data:
                    return None
                self._buffer += data
            elif os.getppid() != self._parent:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


if __name__ == "__main__":
    _help()
    # Not through the interpreter's exit: the client's exit hook would wait for a server that is gone.
    os._exit(0)

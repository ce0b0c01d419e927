"""The spawner: a student's JupyterLab as a Slurm job of a size that the site offers.

What batchspawner lacks: a choice that cannot be forged, news from the queue, and an end to the wait
when the job has died.
"""

from __future__ import annotations

import asyncio
import html
import math
import shlex
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from accounts import refuse_system_account
from batchspawner import SlurmSpawner
from batchspawner.batchspawner import JobStatus
from job_queue import NEVER, Job, NoAnswer, Queue
from settings import Site
from tornado.web import HTTPError
from traitlets import default

#: Seconds between two looks at a job that starts, and lines of its log in an error.
LOOK, LINES = 2, 6
#: The job's output, in the student's home.
LOG = ".jupyterhub-{job}.log"


class JobError(RuntimeError):
    """A start that failed; JupyterHub shows the text."""

    def __init__(self, text: str):
        super().__init__(text)
        self.jupyterhub_message = text


class LabSpawner(SlurmSpawner):
    """A job of one of the site's profiles. `for_site` makes the class that a hub uses."""

    site: Site
    #: Shared by all students of the hub.
    queue: Queue
    #: When the job was submitted, by the clock of the queue.
    _submitted = -math.inf
    #: What the student was told last about the job that starts.
    _told = ""

    @classmethod
    def for_site(cls, site: Site) -> type[LabSpawner]:
        """A subclass that offers the profiles of these settings."""
        return type(
            cls.__name__, (cls,), {"site": site, "queue": Queue(), "__module__": cls.__module__}
        )

    # --- the choice ---------------------------------------------------------------------------

    def _options_form_default(self) -> str:
        choices = "".join(
            f'<option value="{profile.name}">{html.escape(profile.title)}, '
            f"{html.escape(profile.time)}</option>"
            for profile in self.site.profiles
        )
        return (
            '<label for="profile">Size and time (h:min:s) of the job</label>'
            f'<select class="form-control" id="profile" name="profile">{choices}</select>'
        )

    def options_from_form(self, form: dict[str, list[str]]) -> dict[str, str]:
        """The form's choice; what else was posted is left out."""
        return {"profile": form["profile"][0]} if form.get("profile") else {}

    @default("apply_user_options")
    def _apply_user_options_default(self) -> Callable[[LabSpawner, dict[str, Any]], None]:
        return LabSpawner.choose

    def choose(self, options: dict[str, Any]) -> None:
        """Ask for the job that these options name. Raises HTTPError 400 for anything else in them,
        and 403 for an account of the system.

        They may come from the REST API, and batchspawner would put them into the batch script.
        """
        # A token for the REST API needs no log-in.
        refuse_system_account(self.user.name, self.site.hub.minimum_uid)
        known = {profile.name: profile for profile in self.site.profiles}
        if strange := options.keys() - {"profile"}:
            raise HTTPError(400, f"Only 'profile' can be chosen, not {_listed(strange)}.")
        name = options.get("profile", self.site.profiles[0].name)
        if not isinstance(name, str) or name not in known:
            raise HTTPError(400, f"There is no profile {name!r}: choose one of {_listed(known)}.")
        profile = known[name]
        self.user_options = {"profile": name}
        self.req_partition = profile.partition or self.site.slurm.partition
        self.req_account, self.req_runtime = self.site.slurm.account, profile.time
        options = [*self.site.slurm.options, *profile.options]
        self.req_options = "\n".join(f"#SBATCH {option}" for option in options)

    async def submit_batch_script(self) -> str:
        """Submit the job; raises JobError with sbatch's own words."""
        self.choose(self.user_options)
        try:
            job = await super().submit_batch_script()
            self._submitted = time.monotonic()
            return job
        except RuntimeError as error:
            raise JobError(f"Slurm refused the job: {error}") from error

    async def query_job_status(self) -> JobStatus:
        """Where the job is. UNKNOWN, which ends nothing, while Slurm does not answer."""
        try:
            job = await self._job()
        except NoAnswer as error:
            self.log.warning("Slurm does not answer: %s", error)
            return JobStatus.UNKNOWN
        # As batchspawner keeps it: the state, and behind a blank the node.
        self.job_status = f"{job.state} {job.node}" if job else ""
        if self.state_isrunning():
            return JobStatus.RUNNING
        return JobStatus.PENDING if job else JobStatus.NOTFOUND

    async def _job(self) -> Job | None:
        return await self.queue.job(self.job_id, self._submitted) if self.job_id else None

    # --- the wait -----------------------------------------------------------------------------

    async def start(self) -> tuple[str, int]:
        """Start the job and wait until JupyterLab listens; returns its host and port.

        Raises JobError as soon as the job is gone, and shortly before the hub's time limit, which
        would end the wait without a word.
        """
        starting = asyncio.ensure_future(self._start_until_it_listens())
        watching = asyncio.ensure_future(self._watch_job())
        limit = max(self.start_timeout - 2 * LOOK, LOOK)
        self._told = ""
        try:
            await asyncio.wait(
                {starting, watching}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            for ended in (starting, watching):
                if ended.done():
                    return ended.result()
            # Slurm is not asked again: its answer may take longer than the hub waits.
            raise JobError(
                f"{self._told or f'Job {self.job_id} is not up.'} After {self.start_timeout} s, "
                "which is the limit here, the job was cancelled. Choose a smaller one, or try "
                "again later."
            )
        except RuntimeError as error:
            raise error if isinstance(error, JobError) else JobError(str(error)) from error
        finally:
            await self._give_up(starting, watching)

    async def _give_up(self, *tasks: asyncio.Future) -> None:
        """End what still goes on of a start; the job's number stays, so that it can be cancelled.

        batchspawner takes an answer of Slurm that was cut short for a job that is gone, and forgets
        its number: the job would stay in the queue, and start when nobody waits for it.
        """
        if running := {task for task in tasks if not task.done()}:
            job = self.job_id
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            self.job_id = job

    async def _start_until_it_listens(self) -> tuple[str, int]:
        host, port = await super().start()
        # batchspawner reports the port before JupyterLab is started there.
        while not await _listens(host, port):
            await asyncio.sleep(LOOK / 4)
        return host, port

    async def _watch_job(self) -> None:
        """Raise JobError as soon as the job is gone."""
        while True:
            await asyncio.sleep(LOOK)
            job = self.job_id
            if not job:
                continue
            status = await self.query_job_status()
            if status == JobStatus.PENDING:
                await self._raise_if_hopeless()
            if status == JobStatus.NOTFOUND:
                log = LOG.format(job=job)
                raise JobError(
                    f"Job {job} ended before JupyterLab was up. Last lines of ~/{log}: "
                    f"{await self._tail(log) or '(nothing)'}"
                )

    async def _raise_if_hopeless(self) -> None:
        """Raise JobError for a job that waits for nothing that will come."""
        job = await self._job()
        if job and job.reason in NEVER:
            raise JobError(
                f"Job {self.job_id} can never start: {NEVER[job.reason]} ({job.reason}). It was "
                "cancelled. Choose another size, and tell the administrator: it is a mistake in "
                "site.toml."
            )

    async def _tail(self, log: str) -> str:
        """The end of the job's output, read as the student: root may not see the home folders."""
        path = shlex.quote(str(Path(self.req_homedir) / log))
        prefix = self.exec_prefix.format(username=self.user.name)
        try:
            return await self.run_command(f"{prefix} tail -n {LINES} {path}")
        except RuntimeError as error:
            return str(error)

    async def progress(self) -> AsyncIterator[dict[str, str]]:
        """Tell where the job is, each time that it changes."""
        said = None
        while True:
            self._told = await self._where()
            if self._told != said:
                yield {"message": self._told}
            said = self._told
            await asyncio.sleep(LOOK)

    async def _where(self) -> str:
        if not self.job_id:
            return "The job is handed to Slurm."
        if self.state_isrunning():
            place = f"{self.state_gethost()}:{self.port}" if self.port else self.state_gethost()
            return f"Job {self.job_id} runs; JupyterLab starts on {place}."
        try:
            job = await self._job()
        except NoAnswer:
            return f"Job {self.job_id}: Slurm does not answer. The hub asks again."
        reason, begin = (job.reason, job.begin) if job else ("", "")
        when = "" if begin in ("", "N/A") else f", expected to start at {begin}"
        return f"Job {self.job_id} waits in Slurm's queue ({reason or 'no reason given'}{when})."


def kernel_culling(seconds: int, look: int = 60) -> list[str]:
    """Options of a server that ends kernels which ran no cell for so long, in a browser or not."""
    given = {"cull_idle_timeout": seconds, "cull_interval": look, "cull_connected": True}
    return [f"--MappingKernelManager.{name}={value}" for name, value in given.items()]


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), LOOK)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(map(str, names)))

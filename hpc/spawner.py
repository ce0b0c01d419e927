"""The spawner, which starts a student's JupyterLab as a Slurm job of a size that the site offers.

It adds three things to batchspawner: a choice that can't be forged, news from the queue, and an end
of the wait if the job has died.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import choices
import commands
import pages
import partitions
from accounts import refuse_system_account
from batchspawner import SlurmSpawner
from batchspawner.batchspawner import JobStatus
from commands import NoAnswer
from job_queue import Job, Poll, Queue
from jupyterhub.utils import url_path_join
from partitions import Partition
from settings import Site
from tornado.web import HTTPError
from traitlets import default

from utils.jobs.slurm import NEVER

#: Seconds between two looks at a job that starts, and lines of its log in an error message.
LOOK, LAST = 2, 6
#: The file with the job's output, in the student's home folder.
LOG = ".jupyterhub-{job}.log"


class JobError(RuntimeError):
    """A start that failed. JupyterHub shows the text to the student."""

    def __init__(self, text: str):
        super().__init__(text)
        self.jupyterhub_message = text


class LabSpawner(SlurmSpawner):
    """A job of one of the site's profiles. `for_site` makes the class that a hub uses."""

    site: Site
    #: Shared by all students of the hub.
    queue: Queue
    partitions: Poll
    #: Cancellations of jobs whose start was stopped before sbatch had ended.
    withdrawing: set[asyncio.Future[None]] = set()  # noqa: RUF012 - shared on purpose
    #: When the job was submitted, on the queue's clock.
    _submitted = -math.inf
    #: The last message to the student about the job, and the student's last choices in the form.
    _told, _posted = "", None

    @classmethod
    def for_site(cls, site: Site) -> type[LabSpawner]:
        """Return a subclass that offers the profiles of these settings."""
        shared = {"site": site, "queue": Queue(), "partitions": partitions.poll()}
        return type(cls.__name__, (cls,), shared | {"__module__": cls.__module__})

    # --- the choice ---------------------------------------------------------------------------

    def _options_form_default(self) -> Callable[[LabSpawner], Awaitable[str]]:
        return LabSpawner.form

    async def form(self) -> str:
        """Return the page's form, with the student's last choices, and with what is free now."""
        chosen = self._posted or {name: str(value) for name, value in self.user_options.items()}
        return pages.form(self.site, choices.offered(self.site), await self._known(), chosen)

    async def _known(self) -> dict[str, Partition]:
        """Return Slurm's partitions, or none if it doesn't answer, which stops no start."""
        asking = asyncio.ensure_future(self.partitions.answer())
        # An answer that is too late for this student is there for the next one.
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        await asyncio.wait({asking}, timeout=LOOK)
        if asking.done() and not asking.exception():
            return asking.result()
        said = asking.exception() if asking.done() else f"nothing within {LOOK} s"
        self.log.warning("sinfo does not answer: %s", said)
        return {}

    async def options_from_form(self, form: dict[str, list[str]]) -> dict[str, str]:
        """Return the form's choices, and ignore any other field.

        Raises:
            HTTPError: 400, Slurm can never start such a job. The page then shows the form again.
        """
        names = ["profile", *choices.offered(self.site)]
        self._posted = {name: form[name][0] for name in names if form.get(name, [""])[0]}
        await self._possible(self._posted)
        return self._posted

    @default("apply_user_options")
    def _apply_user_options_default(
        self,
    ) -> Callable[[LabSpawner, dict[str, Any]], Awaitable[None]]:
        return LabSpawner.choose

    async def _possible(self, options: dict[str, Any]) -> tuple[dict[str, str], choices.Request]:
        """Return the choices in these options, and their job.

        Raises:
            HTTPError: 400, the site doesn't offer an option, or Slurm can never start the job.
        """
        try:
            chosen = choices.checked(self.site, options)
        except choices.Refused as error:
            raise _refusal(str(error)) from None
        job = choices.request(self.site, chosen)
        if said := job.impossible(await self._known()):
            raise _refusal(f"Such a job can never start: {said}. Choose another size.")
        return chosen, job

    async def choose(self, options: dict[str, Any]) -> None:
        """Set the job that these options name.

        Raises:
            HTTPError: 400 as in `_possible`, or 403 for a system account.
        """
        # Check the account again, because a token for the REST API needs no log-in.
        refuse_system_account(self.user.name, self.site.hub.minimum_uid)
        chosen, job = await self._possible(options)
        self.user_options = chosen
        self.req_partition, self.req_account = job.partition, job.account
        self.req_runtime = job.time
        # Exports come after the #SBATCH lines, because sbatch stops reading at the first command.
        self.req_options = "\n".join([
            *(f"#SBATCH {option}" for option in job.options),
            *(f"export {name}={shlex.quote(value)}" for name, value in job.exports.items()),
        ])

    async def submit_batch_script(self) -> str:
        """Submit the job.

        Raises:
            JobError: Slurm refused the job. The text has sbatch's own words.
        """
        await self.choose(self.user_options)
        submitting = asyncio.ensure_future(super().submit_batch_script())
        try:
            job = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # Cancel the job in the background: JupyterHub waits one second for a start that it
            # stops, and takes the server for ready if the start lasts longer.
            withdrawing = asyncio.ensure_future(self._withdraw(submitting))
            self.withdrawing.add(withdrawing)
            withdrawing.add_done_callback(self.withdrawing.discard)
            raise
        except RuntimeError as error:
            raise JobError(f"Slurm refused the job: {error}") from error
        self._submitted = time.monotonic()
        return job

    async def _withdraw(self, submitting: asyncio.Future[str]) -> None:
        """Cancel the job of a stopped start, once sbatch has printed the job's number.

        If we killed sbatch instead, it might still have submitted a job that nobody knows.
        """
        try:
            if job := await submitting:
                self.job_id = job  # set it again: the stop may have cleared it
                await self.cancel_batch_job()
        except RuntimeError as error:
            self.log.warning("Nothing to cancel behind a start that was stopped: %s", error)
        finally:
            self.clear_state()

    async def query_job_status(self) -> JobStatus:
        """Return the job's status: UNKNOWN, which ends nothing, if Slurm doesn't answer."""
        try:
            job = await self._job()
        except NoAnswer as error:
            self.log.warning("Slurm does not answer: %s", error)
            return JobStatus.UNKNOWN
        # batchspawner expects the state, a blank, and the node.
        self.job_status = f"{job.state} {job.node}" if job else ""
        if self.state_isrunning():
            return JobStatus.RUNNING
        return JobStatus.PENDING if job else JobStatus.NOTFOUND

    async def _job(self) -> Job | None:
        return await self.queue.job(self.job_id, self._submitted) if self.job_id else None

    # --- the wait -----------------------------------------------------------------------------

    async def start(self) -> tuple[str, int]:
        """Start the job, wait until JupyterLab listens, and return its host and port.

        Raises:
            JobError: the job is gone, or the hub's time limit is near, which would end the wait
                without a message.
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
            # Don't ask Slurm again, because its answer may take longer than the hub waits.
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
        """End all pending tasks of a start, but keep the job's number to cancel it by.

        If a call of Slurm is cut short, batchspawner believes that the job is gone and forgets its
        number. The job would then stay in the queue, and start when nobody waits for it.
        """
        if running := {task for task in tasks if not task.done()}:
            job = self.job_id
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            self.job_id = job

    async def _start_until_it_listens(self) -> tuple[str, int]:
        host, port = await super().start()
        # batchspawner reports the port before JupyterLab listens there.
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
                last = "\n".join((await self.log_of(job)).splitlines()[-LAST:])
                raise JobError(
                    f"Job {job} ended before JupyterLab was up. Last lines of "
                    f"~/{self.log_file(job)}: {last or '(nothing)'}"
                )

    async def _raise_if_hopeless(self) -> None:
        """Raise JobError if the job waits for something that will never happen."""
        job = await self._job()
        if job and job.reason in NEVER:
            raise JobError(
                f"Job {self.job_id} can never start: {NEVER[job.reason]} ({job.reason}). It was "
                "cancelled. Choose another size. If you changed nothing, tell the administrator: "
                "it is a mistake in site.toml."
            )

    # --- the session --------------------------------------------------------------------------

    def log_file(self, job: str) -> str:
        """Return the name of the file with the job's output, in the student's home folder."""
        return LOG.format(job=job)

    async def log_of(self, job: str) -> str:
        """Return the end of the log, read as the student: the hub may not see home folders."""
        prefix = shlex.split(self.exec_prefix.format(username=self.user.name))
        path = Path(self.req_homedir) / self.log_file(job)
        return await commands.end_of(path, tuple(prefix), os.environ)

    async def run_command(
        self, cmd: str, input: str | None = None, env: dict[str, str] | None = None
    ) -> str:
        """Run a command as batchspawner does, but without the hub's secrets in a default `env`."""
        env = commands.without_secrets(os.environ) if env is None else env
        return await super().run_command(cmd, input=input, env=env)

    def _seen(self) -> Job | None:
        """Return the job from the queue's last answer, so that a page doesn't wait for Slurm."""
        return (self.queue.seen or {}).get(self.job_id) if self.job_id else None

    def card(self) -> str:
        """Return the session for the hub's page, as HTML, or "" if there is none."""
        job = self._seen()
        if job is None:
            return ""
        return pages.card(self.job_id, job, self._log_address(), datetime.now())

    def time_left(self) -> dict[str, Any]:
        """Return the job's number and the seconds until Slurm ends it, both None if unknown."""
        job = self._seen()
        left = job.seconds_left(datetime.now()) if job and job.state == "RUNNING" else None
        return {"job": None if left is None else self.job_id, "left": left}

    async def progress(self) -> AsyncIterator[dict[str, str]]:
        """Yield a message about the job's progress each time that the message changes."""
        said = None
        while True:
            self._told = await self._where()
            if self._told != said:
                yield {"message": self._told} | self._with_log()
            said = self._told
            await asyncio.sleep(LOOK)

    def _with_log(self) -> dict[str, str]:
        """Return the last message with a link to the log, once there is a log."""
        if not self.job_id or not self.state_isrunning():
            return {}
        return {"html_message": pages.linked(self._told, self._log_address(), "Its log")}

    def _log_address(self) -> str:
        return url_path_join(self.hub.base_url, "job-log", self.job_id)

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
    """Return options for a server: end kernels without a running cell after some seconds.

    The server also ends such a kernel if a browser is still connected to it.
    """
    given = {"cull_idle_timeout": seconds, "cull_interval": look, "cull_connected": True}
    return [f"--MappingKernelManager.{name}={value}" for name, value in given.items()]


def _refusal(text: str) -> HTTPError:
    """Return an HTTPError 400, of which the form shows only the text."""
    error = HTTPError(400, text)
    error.jupyterhub_message = text
    return error


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), LOOK)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

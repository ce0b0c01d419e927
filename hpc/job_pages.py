"""The hub's addresses for a student's job: its log, and the time that it has left."""

from __future__ import annotations

from jupyterhub.handlers import default_handlers
from jupyterhub.handlers.base import BaseHandler
from tornado.web import authenticated


class JobLog(BaseHandler):
    """The end of a job's log, which the hub reads as the student from the home folder."""

    @authenticated
    async def get(self, job: str) -> None:
        """Answer GET job-log/NUMBER."""
        spawner = self.current_user.spawner
        text = await spawner.log_of(job)
        page = await self.render_template(
            "job_log.html", job=job, file=spawner.log_file(job), text=text
        )
        self.finish(page)


class JobTime(BaseHandler):
    """The time left, for JupyterLab: {"job": number, "left": seconds}, both null if unknown."""

    @authenticated
    async def get(self) -> None:
        """Answer GET job-time."""
        self.set_header("Content-Type", "application/json")
        self.finish(self.current_user.spawner.time_left())


def register() -> None:
    """Add these addresses to the hub's, as batchspawner adds its address."""
    default_handlers.extend([(r"/job-log/(\d+)", JobLog), (r"/job-time", JobTime)])

"""Addresses of the hub that show a student the own job: its log, and how much time it has left."""

from __future__ import annotations

from jupyterhub.handlers import default_handlers
from jupyterhub.handlers.base import BaseHandler
from tornado.web import authenticated


class JobLog(BaseHandler):
    """The end of a job's log, read as the student who asks, from the own home folder."""

    @authenticated
    async def get(self, job: str) -> None:
        """GET job-log/NUMBER."""
        spawner = self.current_user.spawner
        text = await spawner.log_of(job)
        page = await self.render_template(
            "job_log.html", job=job, file=spawner.log_file(job), text=text
        )
        self.finish(page)


class JobTime(BaseHandler):
    """For JupyterLab: {"job": number, "left": seconds}, both null without a job that has an end."""

    @authenticated
    async def get(self) -> None:
        """GET job-time."""
        self.set_header("Content-Type", "application/json")
        self.finish(self.current_user.spawner.time_left())


def register() -> None:
    """Add them to the hub's own, as batchspawner does with its address."""
    default_handlers.extend([(r"/job-log/(\d+)", JobLog), (r"/job-time", JobTime)])

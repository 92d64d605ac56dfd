"""The module, bound to one client after the other."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.core.phase import Fit
from fl_lightning.training.executors.base import Executor, LocalJob
from fl_lightning.training.local import train, train_private


class Loop(Executor):
    """One client after the other."""

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """One after the other."""
        return [self._one(job) for job in jobs]

    def _one(self, job: LocalJob) -> Fit:
        module, optimizer = self.module, self.optimizer
        module.binding.rebind(job.vector, job.buffers)  # where it has just been scored, it is bound
        module.set_objective(job.objective)
        job.proximal_numbers = module.proximal_numbers
        module.train_only(job.trains)
        try:
            optimizer.reset(job.lr)
            if job.kept:
                optimizer.load(job.kept)
            if job.private is None:
                fit = train(self.fabric, module, job.part, optimizer, job.schedule, job.step)
            else:
                fit = train_private(
                    self.fabric, module, job.part, optimizer, job.schedule, job.private
                )
            if job.keep:
                job.kept = {k: v.clone() for k, v in optimizer.state().items()}
        finally:
            module.train_only(None)
            module.last.outside()
        return fit

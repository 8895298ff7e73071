"""Faults of the control plane that the simulation must find: each class breaks the one it
inherits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from cluster.client.frontend import Frontend
from cluster.engine.frontends import FrontendRecords, _FrontendRecord
from cluster.engine.loop import Command, RanksLost, RanksReplaced, StepLoop
from cluster.engine.mailbox import Mailbox
from cluster.news import News, pack
from cluster.recovery.states import Recovery, RecoveryState
from cluster.recovery.supervisor import Supervisor
from scheduler.errors import EaglerayError
from scheduler.limits import SchedulerLimits
from scheduler.messages import Deltas, Request
from tests.cluster.recovery.simulator import Parts


class NoFence(Supervisor):
    """The next group starts while processes of the last one may still be alive."""

    def _end_epoch(self, why: str) -> None:
        group = self._group
        assert group is not None
        close, group.close = group.close, lambda **_: None  # type: ignore[method-assign]
        super()._end_epoch(why)
        group.close = close  # type: ignore[method-assign]


class SameEpochAgain(Supervisor):
    """The next group has the number of the last one."""

    def _assemble(self) -> None:
        self._epoch = 0
        super()._assemble()


class DeathsAreNotNoticed(Supervisor):
    """Only a step that fails reveals a death: a rank that dies or hangs between steps is not
    replaced.
    """

    def check_group(self) -> None:
        if self.recovery.state is RecoveryState.SERVING and self._failed_step is None:
            return
        super().check_group()


class FailedStepsAreForgotten(Supervisor):
    """A group whose step has failed is still considered good."""

    def note_failed_step(self, epoch: int, why: str) -> None:
        assert self._group is not None
        self._on_group_ready(self._group, False)


class FailedAssemblyServes(Supervisor):
    """A group that could not be assembled is given to the engine."""

    def _check_assembly(self) -> None:
        if self._assembly is not None and self._assembly.done():
            assert self._group is not None
            self._serve(self._group)


class LostIsIgnored(StepLoop):
    """An idle engine does not learn that its ranks are gone."""

    def _carry_out(self, command: Command) -> None:
        if not isinstance(command, RanksLost):
            super()._carry_out(command)


class ResumesWithTheOldRanks(StepLoop):
    """Steps continue on the group that is gone."""

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, RanksReplaced):
            self._has_ranks = True
        else:
            super()._carry_out(command)


class ConvictionIsNotTold(StepLoop):
    """A request that is convicted just disappears."""

    def _replace_ranks(self, replacement: RanksReplaced) -> None:
        self.engine.executor = replacement.executor
        self._has_ranks = True
        self.engine.start_epoch(cache_survives=replacement.cache_survives)


class CheckpointsAreNotCounted(StepLoop):
    """After a checkpoint, only the tokens that follow it are sent, but numbered from the first
    index.
    """

    def _news(self, output: Any) -> Any:
        news = super()._news(output)
        for frontend_news in news.values():
            for request_id, request_news in frontend_news.items():
                request = self._open_requests.get(request_id)
                if request is not None and request.num_tokens_per_news != 1:
                    request_news.first_index = 0
        return news


class LosesWhatItKept(StepLoop):
    """Tokens that are kept for later count as sent."""

    def _news(self, output: Any) -> Any:
        news = super()._news(output)
        for seq in output.sequences:
            if seq.request_id in self._open_requests:
                self._open_requests[seq.request_id].num_sent_tokens = seq.num_output_tokens
        return news


class NeverTriesAgain(Recovery):
    """After a second failure it waits forever."""

    def retry(self) -> bool:
        return False


class RecoversOnce(Recovery):
    """Later faults are mistaken for known ones."""

    def note_fault(self, why: str) -> bool:
        return self.num_recoveries == 0 and super().note_fault(why)


class ForgetsWhatWasSent(Mailbox):
    """The tokens of a reply that is lost are lost too."""

    def collect(self, acknowledged: int) -> Deltas:
        self._unacknowledged_news = {}
        return super().collect(acknowledged)


class TakesAnyAcknowledgment(Mailbox):
    """An old acknowledgment is mistaken for one of the last reply."""

    def collect(self, acknowledged: int) -> Deltas:
        return super().collect(self._last_reply_number if acknowledged else 0)


class NewReplacesSent(Mailbox):
    """News that was not acknowledged is replaced by later news."""

    def collect(self, acknowledged: int) -> Deltas:
        if self._unsent_news:
            self._unacknowledged_news, self._unsent_news = self._unsent_news, {}
        self._last_reply_number = max(self._last_reply_number, acknowledged) + 1
        return pack(self._last_reply_number, self._unacknowledged_news)


class DeliversOnlyTheLast(FrontendRecords):
    """News that has not been fetched yet is overwritten."""

    def deliver(self, news: dict[int, dict[str, News]]) -> None:
        for registration_number, frontend_news in news.items():
            frontend = self._frontends.get(registration_number)
            if frontend is not None:
                for request_id in frontend_news:
                    frontend.mailbox._unsent_news.pop(request_id, None)
        super().deliver(news)


class SendsTwice(FrontendRecords):
    """A request that is sent again is queued again."""

    def register_requests(
        self, frontend_id: str, requests: list[Request], limits: SchedulerLimits
    ) -> tuple[int, list[Request]]:
        registration_number, _ = super().register_requests(frontend_id, requests, limits)
        return registration_number, requests


class GivesNumbersAgain(FrontendRecords):
    """A frontend that comes back after it was forgotten does not learn it."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._new_numbers = itertools.count(step=0)


class AcceptedByTheDead(Frontend):
    """Requests that a driver accepted before it died count as accepted by the next."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        lost = self._outstanding_requests.lost_requests

        def with_tokens() -> list[Request]:
            return [r for r in lost() if len(r.token_ids) > r.num_prompt_tokens]

        setattr(self._outstanding_requests, "lost_requests", with_tokens)  # noqa: B010


class LostPollsFail(Frontend):
    """A poll whose answer was lost makes all outstanding requests fail."""

    def poll(self) -> None:
        actor, before = self.driver_handle.actor, self._last_reply
        super().poll()
        is_lost = actor is self.driver_handle.actor and self._last_reply == before
        if is_lost and self._outstanding_requests.has_accepted_requests:
            self._fail_outstanding(EaglerayError("a poll was lost"))


def _parts_of(broken: type) -> Parts:
    for base, name in (
        (StepLoop, "loop"),
        (Supervisor, "supervisor"),
        (Recovery, "recovery"),
        (FrontendRecords, "frontends"),
        (Frontend, "frontend"),
    ):
        if issubclass(broken, base):
            changed: Any = {name: broken}
            return Parts(**changed)

    @dataclass(slots=True)
    class BrokenRecord(_FrontendRecord):
        mailbox: Mailbox = field(default_factory=broken)

    class BrokenRecords(FrontendRecords):
        make_record = BrokenRecord

    return Parts(frontends=BrokenRecords)


PLANTED = {
    name: _parts_of(broken)
    for name, broken in list(globals().items())
    if isinstance(broken, type) and broken.__module__ == __name__
}

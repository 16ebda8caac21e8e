"""What the world hears is durable, in order, and once; and what was lost in a crash nobody has heard of."""

import asyncio
from random import Random

from staleflow.runtime.outbox import HeldInstance, HeldRewards, HeldTrainer, Outbox
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.types import Drop, Fence, PullWeights, Return, Submit
from tests.runtime.fakes import FakeInstance, FakeRewards, FakeTrainer, on_virtual_time


class Behind(MemoryJournal):
    """Durable only as far as it is told to be."""

    synced = 0

    @property
    def durable(self) -> int:
        return self.synced


def test_a_message_waits_for_what_was_written_before_it_and_for_no_more() -> None:
    for seed in range(50):
        random, journal = Random(seed), Behind()
        outbox, heard, said = Outbox(journal), list[tuple[int, int]](), 0
        for _ in range(60):
            match random.randrange(4):
                case 0:
                    journal.append(("note",))
                case 1:
                    outbox.send(heard.append, (said, journal.position))
                    said += 1
                case _:
                    journal.synced = random.randint(journal.synced, journal.position)
                    outbox.release()
            assert all(position <= journal.durable for _, position in heard)
            assert [number for number, _ in heard] == list(range(len(heard))), "in order, none twice"
        journal.synced = journal.position
        outbox.release()
        assert (len(heard), len(outbox)) == (said, 0)


def test_a_dead_control_plane_says_nothing_more() -> None:
    journal = Behind()
    outbox, heard = Outbox(journal), list[str]()
    journal.append(("route",))
    outbox.send(heard.append, "before the crash, not durable")
    outbox.close()
    journal.synced = 1
    outbox.release()
    outbox.send(heard.append, "after the crash")
    assert heard == []


def test_every_command_is_held_back_and_every_question_is_answered_at_once() -> None:
    journal = Behind()
    outbox = Outbox(journal)
    instance, trainer, rewards = FakeInstance("i0"), FakeTrainer(), FakeRewards()
    held, fed, scored = HeldInstance(instance, outbox), HeldTrainer(trainer, outbox), HeldRewards(rewards, outbox)
    group = Group("p0", 0, 0, 10, 1)
    fence = Fence(1, 0, 1)
    journal.append(("route",))
    for command in (Submit(fence, []), Return(fence, []), Drop(fence, []), PullWeights(fence, 3)):
        held.send(command)
    fed.feed(0, [group])
    fed.finish(0)
    scored.score(Trajectory("p0/0", group))
    assert (instance.commands, trainer.fed, trainer.finished, rewards.asked) == (
        [],
        [],
        [],
        [],
    )  # none passes
    assert (held.name, held.heard().incarnation, held.held(), fed.durable()) == ("i0", 0, [], 0)
    journal.synced = 1
    outbox.release()
    assert (len(instance.commands), instance.pulls, trainer.fed, trainer.finished) == (4, [3], [(0, "p0")], [0])
    assert rewards.asked == ["p0/0"]
    fed.reset()
    assert trainer.resets == 1


def test_groups_are_fed_at_once_but_no_step_is_finished_before_it_is_durable() -> None:
    journal = Behind()
    outbox, trainer = Outbox(journal), FakeTrainer()
    held, group = HeldTrainer(trainer, outbox), Group("p0", 0, 0, 10, 1)
    journal.append(("lease",))
    held.feed(0, [group])
    held.finish(0)
    assert (trainer.fed, trainer.finished) == ([(0, "p0")], [])
    held.feed(1, [group])  # not before the end of step 0
    assert trainer.fed == [(0, "p0")]
    journal.synced = 1
    outbox.release()
    assert (trainer.fed, trainer.finished) == ([(0, "p0"), (1, "p0")], [0])


def test_the_end_of_a_step_that_waited_for_a_full_disk_is_not_said_to_the_trainer_that_took_over_meanwhile() -> None:
    """It would have finished a step of which it knew nothing, and the groups would have counted as trained."""
    journal = Behind()
    outbox, trainer = Outbox(journal), FakeTrainer()
    held, group = HeldTrainer(trainer, outbox), Group("p0", 0, 0, 10, 1)
    journal.append(("consume",))
    held.feed(0, [group])
    held.finish(0)
    trainer.reset()  # it died, and another is there
    held.reset()
    held.feed(0, [group])
    assert (trainer.fed, trainer.finished) == ([], [])
    journal.synced = 1
    outbox.release()
    assert (trainer.fed, trainer.finished) == ([(0, "p0")], [])
    held.finish(0)
    assert trainer.finished == [0]


def test_how_long_the_end_of_a_step_waited_for_the_journal_is_told() -> None:
    async def main() -> None:
        journal, waits, trainer = Behind(), list[float](), FakeTrainer()
        outbox = Outbox(journal)
        held = HeldTrainer(trainer, outbox, waits.append)
        journal.append(("consume",))
        held.finish(0)
        await asyncio.sleep(2.0)
        journal.synced = 1
        outbox.release()
        assert (waits, trainer.finished) == ([2.0], [0])

    on_virtual_time(main())


def test_what_becomes_durable_between_the_look_and_the_wait_is_not_waited_for_for_ever() -> None:
    class Racing(Behind):
        """Becomes durable right after the first look; whoever is told of that finds nobody waiting."""

        looks = 0

        @property
        def durable(self) -> int:
            self.looks += 1
            return self.position if self.looks > 1 else 0

    journal = Racing()
    journal.append(("lease",))
    heard: list[str] = []
    Outbox(journal).send(heard.append, "now")
    assert heard == ["now"]

"""What the world hears is durable, in order, and once; and what was lost in a crash nobody has heard of."""

from random import Random

from staleflow.runtime.outbox import HeldInstance, HeldRewards, HeldTrainer, Outbox
from staleflow.runtime.ports import Fence
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.lifecycle import Group, Trajectory
from tests.runtime.fakes import FakeInstance, FakeRewards, FakeTrainer


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
    held.submit(fence, [])
    held.interrupt(fence, [])
    held.abort(fence, [])
    held.pull(fence, 3)
    fed.feed(0, [group])
    fed.finish(0)
    scored.score(Trajectory("p0/0", group))
    assert (instance.fences, trainer.fed, trainer.finished, rewards.asked) == ([], [], [], [])  # in order: none passes
    assert (held.name, held.snapshot().life, held.held(), fed.durable()) == ("i0", 0, [], 0)
    journal.synced = 1
    outbox.release()
    assert (len(instance.fences), instance.pulls, trainer.fed, trainer.finished) == (4, [3], [(0, "p0")], [0])
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

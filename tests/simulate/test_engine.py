"""The modelled engine keeps the promises of the interface that real engines keep."""

from random import Random

import pytest

from staleflow.coordinator.cost import CostModel
from staleflow.rollout.engine import Engine, EngineError, Request, Result, Sampling
from staleflow.simulate.engine import SimEngine

COST = CostModel(0.01, 0.005, 0.001, 0.001, 1e-7, 1e-5)


def request(name: str, prompt: int = 10, most: int = 50, **rest: object) -> Request:
    return Request(name, 1, [1] * prompt, sampling=Sampling(max_tokens=most), **rest)  # type: ignore[arg-type]


def test_it_is_an_engine() -> None:
    engine: Engine = SimEngine(COST)
    assert not engine.busy


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_once_with_all_its_tokens_whatever_is_done_to_it(seed: int) -> None:
    random, engine = Random(seed), SimEngine(COST, kv_tokens=2_000, max_running=6)
    ended: dict[str, Result] = {}
    streamed: dict[str, int] = {}
    aborted: set[str] = set()
    waiting = [request(f"t{at}", 10 + at // 3, random.randint(1, 200), group=f"g{at // 3}") for at in range(20)]
    for _ in range(10_000):
        match random.randrange(6):
            case 0 if waiting:
                engine.submit([waiting.pop()])
            case 1:
                engine.interrupt([f"t{random.randrange(20)}"])
            case 2 if random.random() < 0.05:
                names = [f"t{random.randrange(20)}"]
                aborted.update(name for name in names if name in engine._held)
                engine.abort(names)
            case 3 if random.random() < 0.2:
                version = engine.version + 1
                assert engine.pull(lambda _, version=version: version, version) == version
            case _:
                output = engine.step()
                assert not output.failed
                for news in output.progress:
                    streamed[news.name] = streamed.get(news.name, 0) + len(news.tokens)
                for result in output.finished:
                    assert result.name not in ended
                    ended[result.name] = result
                for back in output.returned:
                    assert back.reason == "interrupted"
                    again = request(back.name, 10, 200)
                    if len(back.tokens) < 200:
                        waiting.append(
                            Request(
                                again.name,
                                1,
                                again.prompt,
                                back.tokens,
                                back.logprobs,
                                back.spans,
                                None,
                                again.sampling,
                            )
                        )
                    else:
                        ended[back.name] = back
        if not waiting and not engine.busy:
            break
    assert set(ended) | aborted == {f"t{at}" for at in range(20)}
    for name, result in ended.items():
        assert len(result.tokens) == len(result.logprobs) == sum(count for _, count in result.spans) == streamed[name]
        versions = [version for version, _ in result.spans]
        assert versions == sorted(versions)
    assert engine.snapshot().kv_used == 0


def test_bad_requests_fail_by_name_and_harm_nobody() -> None:
    engine = SimEngine(COST, kv_tokens=160)
    engine.submit([request("good"), request("good"), request("empty", 0), request("long", 100, 100)])
    done = engine.step()
    while engine.busy:
        engine.step()
    assert [each.name for each in done.failed] == ["good", "empty", "long"]
    assert [each.message.partition(": ")[2] for each in done.failed] == [
        "interrupt or abort it first",
        "give at least one token",
        "raise kv_tokens",
    ]


def test_old_weights_and_a_closed_engine_are_refused() -> None:
    engine = SimEngine(COST)
    with pytest.raises(EngineError, match="asked for version 3 of the weights and got 2"):
        engine.pull(lambda _: 2, 3)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.step()

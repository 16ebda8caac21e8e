"""Tools in real processes: what they cannot do, and what is left of them."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from staleflow.agents.tools import Done, ToolLimits, gone, run
from tests.living import alive

pytestmark = pytest.mark.processes


def tool(code: str, given: str = "", limits: ToolLimits | None = None) -> Done:
    return asyncio.run(run([sys.executable, "-I", "-S", "-c", code], given, limits or ToolLimits(seconds=30)))


def test_a_tool_hears_and_says() -> None:
    assert tool("import sys; print(sys.stdin.read().upper())", "abc") == Done("ABC\n", 0, "")


def test_a_tool_starts_in_an_empty_folder_that_is_removed() -> None:
    done = tool("import os; open('x', 'w'); print(os.getcwd(), os.listdir())")
    folder, _, files = done.output.partition(" ")
    assert files.strip() == "['x']"
    assert not Path(folder).exists()


def test_a_tool_does_not_see_the_environment_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert "secret" not in tool("import os; print(dict(os.environ))").output


def test_a_tool_that_takes_too_long_is_killed_with_its_children() -> None:
    code = (
        "import os, subprocess, sys, threading\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'],"
        " start_new_session=True)\n"
        "open(os.environ['HERE'], 'w').write(str(child.pid))\n"
        "threading.Event().wait()"
    )

    async def main(file: Path) -> tuple[Done, int]:
        limits = ToolLimits(seconds=2.0)
        done = await run([sys.executable, "-I", "-S", "-c", code], "", limits, {"HERE": str(file)})
        return done, int(file.read_text())

    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"tool-child-{os.getpid()}"
    try:
        done, child = asyncio.run(main(file))
    finally:
        file.unlink(missing_ok=True)
    assert done.why == "took more than 2 s"
    assert not alive(child)


def test_a_tool_cannot_take_all_memory() -> None:
    done = tool("x = bytearray(1 << 30)", limits=ToolLimits(seconds=30, memory_mib=256))
    assert done.code != 0
    assert "MemoryError" in done.output


def test_a_tool_cannot_write_a_file_without_end() -> None:
    done = tool("open('x', 'wb').write(bytes(8 << 20))", limits=ToolLimits(seconds=30, file_mib=1))
    assert done.code != 0


def test_output_without_end_is_cut_and_read() -> None:
    done = tool("print('x' * 10_000_000)", limits=ToolLimits(seconds=30, output_bytes=100))
    assert (len(done.output), done.code) == (100, 0)


def test_a_cancelled_tool_is_killed() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(run([sys.executable, "-c", "import threading; threading.Event().wait()"]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_program_that_is_not_there_says_so() -> None:
    done = asyncio.run(run(["no-such-program"]))
    assert done.code != 0
    assert "no-such-program" in done.output or "No such file" in done.output


def test_a_killed_process_is_waited_for_until_it_is_gone() -> None:
    """On a busy machine it lives on for a moment after the signal; the pool had closed by then."""

    async def main() -> None:
        child = await asyncio.create_subprocess_exec("sleep", "60")
        waits = asyncio.ensure_future(gone([child.pid]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waits.done()
        child.kill()
        await waits
        assert not alive(child.pid)

    asyncio.run(main())

import asyncio
import contextvars
import gc
import os
import threading
import weakref

import pytest

from hermes_kernel.host.supervisor import Supervisor, SupervisorClosedError

pytestmark = pytest.mark.usefixtures("leaves_nothing")


async def where() -> str:
    return threading.current_thread().name


def test_work_runs_on_the_thread_of_the_supervisor_whoever_asks() -> None:
    supervisor = Supervisor("here")
    try:
        assert supervisor.submit(where()).result(5) == "here"
        assert asyncio.run(supervisor.run(where())) == "here"

        async def nested() -> str:
            return await supervisor.run(where())

        assert supervisor.submit(nested()).result(5) == "here"
    finally:
        supervisor.close()


def test_an_exception_comes_back_to_who_asked() -> None:
    async def fail() -> None:
        raise KeyError("x")

    supervisor = Supervisor("s")
    try:
        with pytest.raises(KeyError):
            supervisor.submit(fail()).result(5)
    finally:
        supervisor.close()


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_comes_back_to_who_asked_and_ends_nobody_elses_work(
    end: type[BaseException],
) -> None:
    async def leave() -> None:
        raise end("now")

    def leave_now() -> None:
        raise end("now")

    supervisor = Supervisor("s")
    try:
        going_on = asyncio.Event()

        async def other() -> str:
            await going_on.wait()
            return "done"

        work = supervisor.submit(other())
        with pytest.raises(end, match="now"):
            supervisor.submit(leave()).result(5)
        supervisor.call(leave_now)
        supervisor.call(going_on.set)
        assert work.result(5) == "done"
    finally:
        supervisor.close()


def test_it_keeps_nothing_of_the_callers_context_alive() -> None:
    class Big:
        pass

    variable: contextvars.ContextVar[Big | None] = contextvars.ContextVar("v", default=None)

    async def look() -> Big | None:
        return variable.get()

    supervisor = Supervisor("s")
    try:
        big = Big()
        reference = weakref.ref(big)
        variable.set(big)
        assert supervisor.submit(look()).result(5) is None
        variable.set(None)
        del big
        gc.collect()
        assert reference() is None
    finally:
        supervisor.close()


def test_closing_runs_what_was_registered_the_last_one_first_and_goes_on_after_a_failure() -> None:
    order = []
    supervisor = Supervisor("s")

    async def first() -> None:
        order.append("first")

    async def second() -> None:
        order.append("second")
        raise RuntimeError("not the end")

    supervisor.on_close(first)
    supervisor.on_close(second)
    supervisor.close()
    assert order == ["second", "first"]


def test_closing_is_idempotent_from_many_threads_and_nothing_can_be_asked_afterwards() -> None:
    supervisor = Supervisor("s")
    threads = [threading.Thread(target=supervisor.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    supervisor.close()
    with pytest.raises(SupervisorClosedError, match="closed"):
        supervisor.submit(where())
    supervisor.call(lambda: None)


def test_what_runs_when_it_is_closed_is_cancelled() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    supervisor = Supervisor("s")
    future = supervisor.submit(work())
    started.wait(5)
    supervisor.close()
    assert cancelled.is_set()
    with pytest.raises(SupervisorClosedError):
        future.result(5)


def test_a_user_loop_is_not_blocked_while_it_closes() -> None:
    async def main() -> int:
        supervisor = Supervisor("s")
        beats = 0

        async def slow() -> None:
            await asyncio.sleep(0.2)

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        supervisor.on_close(slow)
        beating = asyncio.create_task(beat())
        await supervisor.aclose()
        beating.cancel()
        return beats

    assert asyncio.run(main()) >= 3


def test_a_forked_child_ends_nothing_of_its_parents() -> None:
    supervisor = Supervisor("s")
    closed = threading.Event()

    async def note() -> None:
        closed.set()

    supervisor.on_close(note)
    pid = os.fork()
    if pid == 0:
        supervisor.close()
        os._exit(0 if supervisor.closed and not closed.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert supervisor.submit(where()).result(5) == "s"
    supervisor.close()
    assert closed.is_set()

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from time import monotonic

import pytest

from fenceguard.cli._demo import crew
from fenceguard.cli._demo.crew import Worker
from fenceguard.cli._demo.story import DemoError


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Worker]:
    """A worker that says what it hears, prints two words of noise at `noise`, and ends at `end`."""
    (tmp_path / "echo_worker.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    word = json.loads(line)['word']\n"
        "    if word == 'end':\n"
        "        sys.exit('boom')\n"
        "    print('7\\nnoise' if word == 'noise' else json.dumps({'what': word}), flush=True)\n"
    )
    monkeypatch.setattr(crew, "PROGRAM", "echo_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("A")
    yield worker
    worker.end()


def stat(pid: int) -> str:
    """Return the state of a process: R, S, T (stopped) ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_hears_and_answers(echo: Worker) -> None:
    echo.say({"word": "hello"})
    assert echo.hear(within=20) == {"what": "hello"}


def test_a_silent_worker_is_an_error_after_the_bound(echo: Worker) -> None:
    began_at = monotonic()
    with pytest.raises(DemoError) as raised:
        echo.hear(within=0.1)
    assert str(raised.value) == "worker A said nothing within 0.1 s"
    assert monotonic() - began_at >= 0.1


def test_a_worker_that_has_ended_is_an_error_with_its_last_words(echo: Worker) -> None:
    echo.say({"word": "noise"})
    echo.say({"word": "end"})
    for _ in range(2):
        with pytest.raises(DemoError) as raised:
            echo.hear(within=20)
        assert str(raised.value) == "worker A has ended before its time: 7 / noise / boom"


def test_a_frozen_worker_stands_still_until_it_is_thawed(echo: Worker) -> None:
    echo.say({"word": "one"})
    echo.hear(within=20)
    echo.freeze(within=20)
    assert stat(echo.pid) == "T"
    echo.say({"word": "two"})
    with pytest.raises(DemoError):
        echo.hear(within=0.1)
    echo.thaw()
    assert echo.hear(within=20) == {"what": "two"}


def test_a_worker_that_ends_instead_of_freezing_is_an_error(echo: Worker) -> None:
    os.kill(echo.pid, signal.SIGKILL)
    with pytest.raises(DemoError) as raised:
        echo.freeze(within=20)
    assert "has ended before its time" in str(raised.value)


def test_a_frozen_worker_can_be_ended(echo: Worker) -> None:
    echo.freeze(within=20)
    echo.end()
    assert not Path(f"/proc/{echo.pid}").exists()


def test_a_worker_is_no_argument_of_its_process_list(echo: Worker) -> None:
    echo.say({"word": "s3cr3t"})
    echo.hear(within=20)
    assert json.dumps("s3cr3t").encode() not in Path(f"/proc/{echo.pid}/cmdline").read_bytes()

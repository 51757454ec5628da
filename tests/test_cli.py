"""The command line: what its commands print and write, and what bad input costs (nothing)."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from marl import cli, config, experiment
from marl.logging import read_rows

TINY = (
    "env=toy/cooperative",
    "training.num_envs=4",
    "training.rollout_length=8",
    "training.log_interval=1",
    "evaluation.episodes=4",
    "team.learner.hidden_sizes=[8]",
    "team.learner.num_epochs=1",
)


def train(*arguments):
    return cli.main(["train", *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of three updates. Tests read it; they do not write to it."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert train("ippo", *TINY, "training.total_steps=96", "--out", str(out), "--quiet") == 0
    return out


@pytest.fixture
def own_copy(trained, tmp_path):
    """A copy of that run that a test may change."""
    import shutil

    return shutil.copytree(trained, tmp_path / "tiny")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([c, "-h"] for c in cli.COMMANDS)]
)
def test_help_and_version_exit_with_0(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    assert capsys.readouterr().err == ""


def test_the_version_names_what_matters(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    out = capsys.readouterr().out
    for name in ("marl ", "jax ", "dm-haiku ", "optax ", "jaxmarl "):
        assert name in out
    assert "--xla_cpu_enable_concurrency_optimized_scheduler=false" in out


def test_help_imports_nothing_heavy():
    code = """
import sys
from marl import cli
try:
    cli.main(["--help"])
except SystemExit:
    pass
print([name for name in ("jax", "haiku", "omegaconf", "jaxmarl", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_python_runs_the_package_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "marl", "envs", "nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("marl envs: no suite 'nowhere' of environments: choose from jax")
    assert "goes by my_package.my_module:make_env" in done.stderr


def test_presets_are_listed(capsys):
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(config.presets())
    assert all(len(line.split()) > 3 and len(line) < 120 for line in lines)


def test_environments_are_listed(capsys):
    assert cli.main(["envs", "jaxmarl"]) == 0
    out = capsys.readouterr().out
    assert "jaxmarl/MPE_simple_spread_v3 " in out and "toy/" not in out
    assert re.search(r"^jaxmarl/LearnedPolicyEnemySMAX +not here: ", out, re.MULTILINE)
    assert cli.main(["envs"]) == 0
    assert "toy/cooperative" in capsys.readouterr().out


def test_describe_shows_the_team_and_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["env=toy/heterogeneous", "training.total_steps=20_000", "team.critic=all"]
    assert cli.main(["describe", "ippo", *settings]) == 0
    out = capsys.readouterr().out
    assert out.startswith("environment toy/heterogeneous\n4 agents in 3 groups")
    assert "20,000 steps are 10 updates of 16 environments x 125 steps" in out
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_written_whole(trained):
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "best",
        "checkpoints",
        "summary.json",
    }
    assert [row["env_steps"] for row in read_rows(trained / "metrics.jsonl")] == [32, 64, 96]
    loaded = config.load(trained / "config.yaml")
    assert loaded == config.load("ippo", [*TINY, "training.total_steps=96"])


def test_progress_is_on_stderr_and_the_result_on_stdout(tmp_path, capsys):
    out = tmp_path / "run"
    longer = ["training.rollout_length=16", "training.total_steps=64"]
    assert train("ippo", "--out", str(out), *TINY, *longer) == 0
    printed = capsys.readouterr()
    assert "64/64 steps" in printed.err and "compiling the training program" in printed.err
    assert "stochastic" in printed.out and f"marl eval {out}" in printed.out
    assert train("ippo", "--quiet", *TINY, "training.total_steps=32", "--out", str(out / "b")) == 0
    assert capsys.readouterr() == ("", "")


def test_runs_have_directories_of_their_own_by_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("ippo", *TINY, "training.total_steps=32", "--quiet") == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ippo-20")


def test_eval_prints_one_json_object(trained, capsys):
    assert cli.main(["eval", str(trained), "--episodes", "6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"stochastic", "greedy"}
    assert result["greedy"]["episodes"] == 6
    assert 0 <= result["greedy"]["returns"]["row"]["mean"] <= 1


def test_eval_prints_a_table(trained, capsys):
    assert cli.main(["eval", str(trained), "--episodes", "6"]) == 0
    out = capsys.readouterr().out
    assert "greedy\n  episodes               6\n" in out and "(std " in out


def test_a_run_goes_on_where_it_stopped(own_copy, capsys):
    assert train("--resume", str(own_copy), "training.total_steps=160", "--quiet") == 0
    assert [row["env_steps"] for row in read_rows(own_copy / "metrics.jsonl")] == [
        32,
        64,
        96,
        128,
        160,
    ]
    assert config.load(own_copy / "config.yaml").training.total_steps == 160
    assert capsys.readouterr().out == ""


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(own_copy, capsys):
    assert train("--resume", str(own_copy), "training.total_steps=128", "--quiet") == 0
    newest = own_copy / "checkpoints" / "step_000000000128" / "arrays.npz"
    newest.write_bytes(newest.read_bytes()[:100])
    capsys.readouterr()
    assert cli.main(["eval", str(own_copy), "--episodes", "4", "--json"]) == 0
    printed = capsys.readouterr()
    assert "step_000000000128 is damaged" in printed.err
    json.loads(printed.out)
    assert train("--resume", str(own_copy)) == 0
    assert "step_000000000128 is damaged" in capsys.readouterr().err
    steps = [row["env_steps"] for row in read_rows(own_copy / "metrics.jsonl")]
    assert steps == [32, 64, 96, 128]


def snapshot(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


BAD = [
    (["train", "mapo"], "unknown preset 'mapo'; did you mean 'mappo'"),
    (["train"], "name a preset or a YAML file first"),
    (["train", "training.seed=3"], "name a preset or a YAML file first"),
    (["train", "ippo", "training.num_envz=3"], "did you mean 'training.num_envs'"),
    (["train", "ippo", "seed"], "'seed' is not of the form key=value"),
    (["train", "ippo", "env=jaxmarl/MPE_simple_sprea_v3"], "MPE_simple_spread_v3"),
    (["train", "ippo", "env=jaxmrl/MPE_simple_v3"], "no suite 'jaxmrl'"),
    (["train", "ippo", *TINY, "env.kwargs.sise=3"], "toy/cooperative has no argument 'sise'"),
    (["train", "ippo", *TINY, "team.learner=pppo"], "did you mean 'ppo'"),
    (["train", "ippo", *TINY, "team.learner.clip_epss=.1"], "team.learner.clip_epsilon"),
    (["train", "ippo", *TINY, "team.learner.gamma=1.5"], "gamma = 1.5 is out of range"),
    (["train", "ippo", *TINY, "team.critic=al"], "did you mean 'all'"),
    (["train", "ippo", *TINY, "team.critic=state"], "global state"),
    (["train", "ippo", *TINY, "team.sharing=grup"], "did you mean 'group'"),
    (["train", "ippo", *TINY, "team.death=contine"], "did you mean 'continue'"),
    (["train", "ippo", *TINY, "team.overrides.wolf_*.gamma=.5"], "row, column"),
    (["train", "ippo", *TINY, "team.learner.num_minibatches=3"], "not divisible"),
    (["train", "ippo", *TINY, "training.total_steps=31"], "4 * 8 = 32 steps"),
    (["train", "ippo", *TINY, "training.num_envs=2.5"], "expected a whole number"),
    (["train", "ippo", "--resume", "x"], "leave 'ippo' away"),
    (["train", "--resume", "x", "--out", "y"], "leave --out away"),
    (["train", "--resume", "nowhere"], "there is no run directory nowhere"),
    (
        ["describe", "ippo", *TINY, f"training.seed={2**32 - 1}", "training.num_seeds=2"],
        "seeds end at 4294967295",
    ),
    (["describe", "mapo"], "did you mean 'mappo'"),
    (["describe"], "name a preset"),
    (["envs", "jaxmrl"], "jaxmarl, toy"),
    (["eval", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_a_message_and_exit_code_2(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.out == "" and "Traceback" not in printed.err
    assert len(printed.err.splitlines()) < 20
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    "arguments", [[], ["trian"], ["eval"], ["eval", "x", "--episodes", "0"], ["train", "--fast"]]
)
def test_a_malformed_command_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: marl" in capsys.readouterr().err


BAD_FOR_A_RUN = [
    (["ippo", *TINY, "--out"], "exists and is not empty"),
    (["--resume"], "has done 96 of 96 steps"),
    (["training.num_envs=8", "training.total_steps=960", "--resume"], "training.num_envs cannot"),
    (["team.learner.gamma=0.5", "training.total_steps=960", "--resume"], "team.learner.gamma"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_FOR_A_RUN)
def test_a_run_that_exists_is_not_touched(trained, arguments, expected, capsys):
    before = snapshot(trained)
    assert train(*arguments, str(trained)) == 2
    assert expected in capsys.readouterr().err
    assert snapshot(trained) == before


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("toy/cooperative", "toy/roster", "agents"),
        ("- 8\n", "- 16\n", "of another structure"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(own_copy, old, new, expected, capsys):
    file = own_copy / "config.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    before = snapshot(own_copy)
    assert cli.main(["eval", str(own_copy)]) == 2
    assert expected in capsys.readouterr().err
    file.write_text(file.read_text().replace("total_steps: 96", "total_steps: 960"))
    assert train("--resume", str(own_copy)) == 2
    assert expected in capsys.readouterr().err
    after = snapshot(own_copy)
    assert {k: v for k, v in after.items() if k.name != "config.yaml"} == {
        k: v for k, v in before.items() if k.name != "config.yaml"
    }


def test_an_interrupted_run_says_what_was_saved(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    real = experiment.train

    def interrupted(*args, **kwargs):
        run = real(*args, **kwargs)
        run.interrupted = True
        return run

    monkeypatch.setattr(experiment, "train", interrupted)
    assert train("ippo", *TINY, "training.total_steps=32", "--out", str(out), "--quiet") == 130
    err = capsys.readouterr().err
    assert "interrupted after 32 steps" in err and f"marl train --resume {out}" in err


def test_an_interrupt_elsewhere_exits_with_130(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "presets", cli.COMMANDS["presets"]._replace(run=interrupt))
    assert cli.main(["presets"]) == 130
    assert capsys.readouterr().err == "marl presets: interrupted\n"


@pytest.mark.slow
def test_ctrl_c_saves_the_run(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "marl.cli", "train", "ippo", *TINY, "training.total_steps=1e9"]
        + ["--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"marl train --resume {out}" in err and "Traceback" not in err
    (saved,) = (out / "checkpoints").iterdir()
    last = read_rows(out / "metrics.jsonl")[-1]["env_steps"]
    assert int(saved.name.removeprefix("step_")) == last
    assert json.loads((out / "summary.json").read_text())["interrupted"] is True

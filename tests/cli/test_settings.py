import inspect
import re

import pytest
from refusals import refuses

from fl_lightning import cli
from fl_lightning.configuration.files import layer_of, read_config
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.merging import DEFAULT_CALLBACKS, Settings


def merged(*layers):
    """Settings of layers in order; text stands for flags."""
    parts = [
        layers_of_flags(read_flags(layer.split())[1])[0] if isinstance(layer, str) else [layer]
        for layer in layers
    ]
    return Settings.merged(layer for part in parts for layer in part)


def test_later_flags_and_files_win_in_order(tmp_path):
    for name, rounds in (("a", 3), ("b", 4)):
        (tmp_path / f"{name}.yaml").write_text(
            f"federation: {{rounds: {rounds}}}\ndata.alpha: {rounds}"
        )
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert merged(f"--config {a} --config={b}").plain == {
        "federation": {"rounds": 4},
        "data": {"alpha": 4},
    }
    assert merged(f"--config {a} --federation.rounds 9 --config {b} --data.alpha=-1").plain == {
        "federation": {"rounds": 4},
        "data": {"alpha": "-1"},
    }


def test_a_switch_alone_means_true_and_other_keys_need_a_value():
    assert merged("--smoke --data.download --resume false").plain == {
        "smoke": "true",
        "data": {"download": "true"},
        "resume": "false",
    }
    with refuses(r"seed: it needs a value"):
        merged("--seed --smoke")


@pytest.mark.parametrize("words", ["seed 3", "--seed 3 4", "-s 3"])
def test_stray_words_are_refused(words):
    with refuses("expected --key value"):
        merged(words)


@pytest.fixture
def called(monkeypatch):
    """What the function of a command is called with."""

    def of(line):
        name, *words = line.split()
        real, arguments = cli._function(name), {}

        def stub(**given):
            arguments.update(given)

        stub.__signature__, stub.__doc__ = inspect.signature(real), real.__doc__  # type: ignore[attr-defined]
        monkeypatch.setattr(cli, "_function", lambda _: stub)
        cli._run(name, words)
        monkeypatch.undo()
        return arguments

    return of


@pytest.mark.parametrize(
    "line, arguments",
    {
        "compare --accept-changed-code a b --target=0.9": {
            "runs": ["a", "b"],
            "accept_changed_code": "true",
            "target": "0.9",
        },
        "study s.yaml --out o --data.root x --slurm false --model cnn": {
            "definition": "s.yaml",
            "out": "o",
            "slurm": "false",
            "config": ["--data.root", "x", "--model", "cnn"],
        },
        "submit --sbatch --exclusive --config kapc_digits --smoke --nodes 2": {
            "sbatch": "--exclusive",
            "nodes": "2",
            "config": ["--config", "kapc_digits", "--smoke"],
        },
        "check-method m.Mine --out o --seed 3": {
            "own_method": "m.Mine",
            "out": "o",
            "config": ["--seed", "3"],
        },
        "submit --resume": {"config": ["--resume"]},
    }.items(),
)
def test_one_reader_serves_every_command(called, line, arguments):
    """Words, switches before words, hyphens, keys of the command and of the run, values that look
    like flags."""
    assert called(line) == arguments


@pytest.mark.parametrize(
    "command, words, message",
    [
        ("tune", "s --out o --trials 0", "trials=0: it must be at least 1"),
        ("plan", "--samples inf", "samples='inf': it must be a whole number"),
        ("compare", "a --out --judge after", "out: it needs a value"),
        (
            "study",
            "s --sed 3",
            r"sed='3': no such key \(did you mean seeds\?\); keys: see ",
        ),
        ("export", "--client 1", "run: it must be given"),
    ],
)
def test_wrong_keys_and_values_of_a_command(command, words, message):
    with refuses(f"^{message}"):
        cli._run(command, words.split())


PROX = {"method": {"name": "fedprox", "init_args": {"mu": 0.5}}}


@pytest.mark.parametrize(
    "flags, class_name, init_args",
    [
        ("--method.mu 1", "FedProx", {"mu": "1"}),
        ("--method.init_args.mu 1", "FedProx", {"mu": "1"}),
        ("--method FedProx", "FedProx", {"mu": 0.5}),
        ("--method fedavg", "FedAvg", {}),
        ("--method kapc --method.lam 2", "KAPC", {"lam": "2"}),
        ("--method fedavg --method fedprox", "FedProx", {}),
    ],
)
def test_another_method_drops_the_arguments_of_the_one_before(flags, class_name, init_args):
    method = merged(PROX, flags).method
    assert method.class_path.rpartition(".")[2] == class_name
    assert method.init_args == init_args


def test_a_method_may_be_named_by_its_class_path_or_as_plain_text():
    path = "fl_lightning.methods.fedprox.FedProx"
    ways = [{"name": "fedprox"}, {"class_path": path}, {"class_path": "fedprox"}, path, "fedprox"]
    assert {merged({"method": way}).method.class_path for way in ways} == {path}


@pytest.mark.parametrize(
    "method, message",
    [
        (3, "^method"),
        (["kapc"], "^method"),
        ({"name": 3}, "^method"),
        ({"name": "kapc", "init_args": [1]}, "^method"),
        (
            {"name": "kapc", "class_path": "fl_lightning.methods.fedavg.FedAvg"},
            r"^method=.*not both",
        ),
        (
            {"name": "kapc", "lam": 1, "init_args": {"lam": 2}},
            r"^method\.lam=1.*also in init_args, as 2",
        ),
    ],
)
def test_what_is_no_component_or_says_something_twice_is_refused(method, message):
    with refuses(message):
        merged({"method": method})


def test_several_models_with_counts():
    listed = {
        "model": [
            {"name": "cnn", "count": 3},
            {"name": "mlp", "count": "7", "init_args": {"hidden": [4]}},
        ]
    }
    models = merged(listed).models
    assert [(m.component.class_path.rpartition(".")[2], m.count) for m in models] == [
        ("CNN", 3),
        ("MLP", 7),
    ]
    assert models[1].component.init_args == {"hidden": [4]}
    assert len(merged(listed, "--model cnn").models) == 1
    with refuses("several models"):
        merged(listed, "--model.hidden [3]")
    with refuses(r"model\[0\].count"):
        merged({"model": [{"name": "cnn", "count": "some"}]})
    with refuses(r"model\[0\].*which model"):
        merged({"model": [{"count": 3}]})


def test_callbacks_are_merged_by_name_and_null_removes_one():
    assert tuple(merged().callbacks) == DEFAULT_CALLBACKS
    settings = merged(
        {"callbacks": {"heatmaps": {"every": 5, "png": False}, "progress": None}},
        {"callbacks": {"heatmaps": {"every": 6}}},
        "--callbacks.checkpoint null --callbacks.Heat_Maps.every 7",
    )
    assert settings.callbacks["heatmaps"].init_args == {"every": "7", "png": False}
    assert settings.callbacks["progress"] is settings.callbacks["checkpoint"] is None


def test_loggers_by_name_with_commas_and_null_for_none():
    settings = merged({"loggers": {"wandb": {"project": "x"}}}, "--loggers wandb,tensorboard")
    assert {name: logger.init_args for name, logger in settings.loggers.items()} == {
        "wandb": {"project": "x"},
        "tensorboard": {},
    }
    assert set(merged({"loggers": {"wandb": {}}}, "--loggers null").loggers.values()) == {None}


@pytest.mark.parametrize(
    "flags",
    [
        "--callbacks heatmpas",
        "--callbacks.heatmpas null",
        "--callbacks.heatmaps 3",
        "--loggers [1]",
        "--loggers {",
    ],
)
def test_bad_callbacks_and_loggers(flags):
    with refuses(r"^(callbacks|loggers)"):
        merged(flags)


def test_an_empty_section_says_nothing(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("callbacks:\n  # heatmaps:\ndata:\nmethod:\n")
    assert read_config(str(file)) == [{}]
    file.write_text("")
    assert read_config(str(file)) == [{}]
    file.write_text("callbacks:\nloggers: null\n")
    # written out, null removes all, as on the command line
    assert read_config(str(file)) == [{"loggers": None}, {}]
    assert set(merged({"loggers": {"wandb": {}}}, *read_config(str(file))).loggers.values()) == {
        None
    }
    # what is named beside it is there
    file.write_text("callbacks: null\ncallbacks.topk.share: 0.5\n")
    kept = {name for name, c in merged(*read_config(str(file))).callbacks.items() if c is not None}
    assert kept == {"topk"}
    file.write_text("callbacks: ''\n")
    with refuses("no such name"):
        merged(*read_config(str(file)))


@pytest.mark.parametrize(
    "text, told",
    {
        "federation:\n  rounds: 3\n bad: [": "line 3, column",
        "- 1": "lines of key: value",
        "federation: {ronds: 3}": r"federation.ronds=3.*did you mean federation.rounds\?.*a.yaml",
        "config: b.yaml": "no such key",
        "dtaa:": "^dtaa=None.*no such key",
        "federation: 3": "group of keys: set one of federation.rounds",
    }.items(),
)
def test_bad_files_are_told_with_file_and_place(tmp_path, text, told):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with refuses(told) as caught:
        read_config(str(file))
    assert "a.yaml" in str(caught.value)


def test_keys_that_earlier_versions_wrote_say_nothing(tmp_path):
    file = tmp_path / "a.yaml"
    text = "fabric: {channels_last: false}\ncallbacks: {wireless: {channel: fitted, far: 300.0}}\n"
    file.write_text(text)
    (layer,) = read_config(str(file))
    assert layer == {"fabric": {}, "callbacks": {"wireless": {"far": 300.0}}}
    file.write_text("fabric.channels_last: true\n")
    with refuses(r"^fabric\.channels_last=True: no such key"):
        read_config(str(file))


def test_a_missing_file_is_answered_with_the_shipped_ones():
    with refuses(r"did you mean kapc_mnist\?.*kapc_digits, kapc_exact_digits, kapc_mnist"):
        read_config("kapc_minst.yaml")


def test_a_bare_fit_is_the_recommended_method_with_its_own_defaults():
    """To name the method changes nothing: a method has its class's arguments, whoever names it."""
    assert merged().method == merged("--method crosskapc").method
    assert merged("--method.guard 2").method.init_args == {"guard": "2"}
    assert merged("--method kapc").method.init_args == {}
    assert merged({"method": {"name": "kapc"}}, "--method.lam 2").method.init_args == {"lam": "2"}
    assert merged({"method": {"class_path": "mine.Own"}}).method.init_args == {}


@pytest.mark.parametrize(
    "text, said",
    {
        "data: {alpha: 0.1}\nseed: 1\ndata: {alpha: 0.3}\n": "line 3, column 1: the key 'data' is given twice",
        "data:\n  alpha: 0.1\n  alpha: 0.3\n": "line 3, column 3: the key 'alpha' is given twice",
        "data: {alpha: [}\n": "line 1, column 16: ",
        "federation:\n  rounds: 010\n": "line 2, column 11: YAML reads 010 as 8 (octal, or base 60)",
        "federation.rounds: 1:30\n": "line 1, column 20: YAML reads 1:30 as 90",
        "data: {alpha: 0.1}\ndata.alpha: 0.3\n": "data.alpha=0.3: it is given twice, also as 0.1",
        "method.lam: 3\nmethod: {name: ditto, lam: 1}\n": "method.lam=3: it is given twice",
    }.items(),
)
def test_a_config_with_a_key_twice_or_broken_is_one_line(text, said, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with refuses(re.escape(said)):
        read_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("turned", [False, True])
def test_a_file_may_name_a_component_and_set_its_arguments_with_dots(turned):
    """Whichever comes first: the arguments are those of what the file names."""
    content = {
        "method": "fedprox",
        "method.mu": 0.2,
        "model": "mlp",
        "model.hidden": [3],
        "callbacks": "quantize,progress",
        "callbacks.quantize.bits": 4,
    }
    given = dict(reversed(content.items())) if turned else content
    settings = Settings.merged([layer_of("own.yaml", given)])
    assert (settings.method.class_path, settings.method.init_args) == (
        "fl_lightning.methods.fedprox.FedProx",
        {"mu": 0.2},
    )
    assert settings.models[0].component.init_args == {"hidden": [3]}
    assert settings.callbacks["quantize"].init_args == {"bits": 4}
    with refuses(r"^model=.*give each item its own arguments"):
        layer_of("own.yaml", {"model": ["cnn", "mlp"], "model.hidden": [3]})


@pytest.mark.parametrize("command", ["plan", "check-method x.Y", "deploy --out x"])
@pytest.mark.parametrize("flag", ["resume", "print_config", "accept_changed_code", "name"])
def test_a_command_that_starts_no_run_refuses_the_keys_of_a_start(command, flag):
    name, *words = command.split()
    with refuses(f"^{flag}=.*no such key.*see fl-train {name} --help"):
        cli._run(name, [*words, f"--{flag}", "true"])


# ---------------------------------------------------------------- base


def test_a_config_lies_over_its_base_and_that_over_its_own(tmp_path):
    """By the rules of several --config: the same class keeps its arguments. Files beside it come
    first."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.yaml").write_text("base: deep/b.yaml\nmethod.mu: 0.2\nfederation.rounds: 3\n")
    (tmp_path / "deep/b.yaml").write_text(
        "base: kapc_exact_digits\nmethod: fedprox\nfederation.clients: 4\n"
    )
    settings = merged(f"--config {tmp_path}/a.yaml --federation.rounds 7")
    assert settings.method.class_path.endswith("FedProx") and settings.method.init_args == {
        "mu": 0.2
    }
    assert (settings.plain["federation"]["rounds"], settings.plain["federation"]["clients"]) == (
        "7",
        4,
    )
    assert settings.plain["data"]["source"] == "digits"  # of the base's base's base
    (tmp_path / "deep/kapc_exact_digits").write_text("data.source: mnist\n")
    assert merged(f"--config {tmp_path}/a.yaml").plain["data"] == {"source": "mnist"}


@pytest.mark.parametrize(
    "files, told",
    [
        (
            {"a": "base: a.yaml"},
            r"^base='a.yaml'.* its own base: remove base from one of \S+a.yaml -> \S+a.yaml$",
        ),
        (
            {"a": "base: b.yaml", "b": "base: ./a.yaml"},
            r"^base='./a.yaml'.*\S+a.yaml -> \S+b.yaml -> \S+a.yaml$",
        ),
        (
            {"a": "base: kapc_digit"},
            r"^base='kapc_digit': no such file \(did you mean kapc_digits\?\)",
        ),
        (
            {"a": "base: [digits, kapc_mnist]"},
            r"^base=\['digits', .*: .* name or the file of one config \(in \S+a.yaml\)$",
        ),
        ({"a": "base: b.yaml", "b": "ronds: 3"}, r"^ronds=3.*no such key.*\(in b.yaml\)$"),
        (
            {"a": "base: b.yaml", "b": "[1]"},
            r"^base='b.yaml': it must contain lines of key: value$",
        ),
    ],
)
def test_a_base_that_cannot_work_is_one_line(files, told, tmp_path):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with refuses(told):
        read_config(str(tmp_path / "a.yaml"))

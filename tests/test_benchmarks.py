"""The benchmarks: run end to end with tiny settings, their baselines, their rows, their mistakes, and the README."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from efficient_densenet import execution_plan
from helpers import MODES, assert_same, images, toy, training_state

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import conversion  # noqa: E402
import cuda_counts  # noqa: E402
import gpu_check  # noqa: E402
import measure  # noqa: E402
import memory  # noqa: E402
import report  # noqa: E402
import scaling  # noqa: E402
import speed  # noqa: E402

COMMANDS = {"memory": memory, "speed": speed, "conversion": conversion, "cuda_counts": cuda_counts,
            "gpu_check": gpu_check, "report": report, "scaling": scaling}  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# The commands


def test_the_memory_benchmark_measures_prints_and_writes(tmp_path):
    """As a command; two modes, two depths, two blocks."""
    command = [
        sys.executable, "benchmarks/memory.py", "--modes", "naive,checkpoint", "--depths", "16,28", "--blocks", "4,8",
        "--batch_size", "2", "--image_size", "16", "--output", f"{tmp_path}/rows.csv", "--figure", f"{tmp_path}/f.png",
    ]  # fmt: skip
    # torch 2.4's own checkpointing calls what torch 2.4 deprecates
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    rows = read(tmp_path / "rows.csv")
    assert [(row["model"], row["layers"], row["mode"]) for row in rows] == [
        (model, layers, mode)
        for model, layers in [("densenet_bc", "6"), ("densenet_bc", "12"), ("dense_block", "4"), ("dense_block", "8")]
        for mode in ("naive", "checkpoint")
    ]
    for naive, checkpoint in zip(rows[::2], rows[1::2]):
        assert float(naive["peak_mib"]) > float(checkpoint["peak_mib"]) > float(checkpoint["kept_mib"]) > 0
    for row in rows:
        assert row["status"] == "ok" and row["torch"] == torch.__version__
        assert all(row[column] for column in ("hardware", "threads", "python", "dtype", "device", "process_mib"))
        assert row["command"].startswith("python benchmarks/memory.py --modes naive,checkpoint")
    assert len(done.stdout.splitlines()) == 1 + len(rows)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["f.png", "rows.csv"]


def test_the_speed_benchmark_times_every_mode_in_both_layouts(tmp_path, capsys):
    speed.main(f"--depth 10 --batch_size 2 --image_size 8 --rounds 2 --output {tmp_path}/s.csv".split())
    rows = read(tmp_path / "s.csv")
    modes = ["naive", "concatenation", *MODES]
    assert [(row["mode"], row["channels_last"]) for row in rows] == [("naive", "True"), ("naive", "False")] + [
        (mode, layout) for mode in modes[1:] for layout in ("False", "True")
    ]
    assert rows[0]["ratio"] == "1.0"
    assert all(float(row["step_ms"]) > 0 and float(row["ratio"]) > 0 and row["rounds"] == "2" for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@pytest.mark.skipif(
    not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch asks the driver for the device of a fake CUDA tensor"
)
def test_the_counts_need_no_gpu(tmp_path, capsys):
    flags = "--depth 10 --batch_size 8 --image_size 16 --dtype bf16 --modes naive,concatenation,lean --output"
    cuda_counts.main([*flags.split(), f"{tmp_path}/c.csv"])
    rows = read(tmp_path / "c.csv")
    assert [(row["mode"], row["device"], row["dtype"]) for row in rows] == [
        (mode, "cuda", "bf16") for mode in ("naive", "concatenation", "lean")
    ]
    for row in rows:
        number = {name: int(row[name]) for name in row if name.endswith(("launches", "bytes", "waits"))}
        assert number["bytes"] == number["read_bytes"] + number["written_bytes"] and number["host_waits"] == 0
        assert number["launches"] > number["forward_launches"] > 0 < number["loaded_bytes"]
        assert number["peak_bytes"] > number["kept_bytes"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_conversion_is_measured_network_by_network(tmp_path):
    """Peaks in fresh processes, times in turn; rows of other networks stay. Kills: a rerun that loses the others."""
    pytest.importorskip("torchvision")
    peaks, times = tmp_path / "conversion_peaks.csv", tmp_path / "conversion_times.csv"

    def command(flags: str, output: Path) -> list[dict[str, str]]:
        words = f"benchmarks/conversion.py {flags} --image_size 32 --batch_size 2 --output {output}".split()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return read(output)

    before = command("--networks tiramisu", peaks)
    assert [row["mode"] for row in before] == ["original", "fused", "lean"]
    found = [float(row["peak_mib"]) for row in before]
    assert found[0] > 1.5 * found[1] and all(row["status"] == "ok" and row["cpu_capability"] for row in before)
    rows = command("--networks torchvision --modes lean", peaks)
    assert rows[2:] == before and [row["mode"] for row in rows[:2]] == ["original", "lean"]
    timed = command("--networks tiramisu --time True --rounds 2", times)
    assert [(row["mode"], row["channels_last"]) for row in timed] == [
        ("original", "True"), ("original", "False"), ("fused", "True"), ("lean", "True")
    ]  # fmt: skip
    assert timed[0]["ratio"] == "1.0" and all(float(row["fastest_ratio"]) > 0 for row in timed)
    text = report.render_conversion(tmp_path)
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5 and {len(cells) for cells in table[2:]} == {6}
    assert "| Tiramisu, FC-DenseNet67, batch 2, 32x32 | as it is |" in text
    measure.write_rows(str(times), [row | {"ratio": "0.5", "fastest_ratio": "0.25"} for row in timed[1:2]])
    assert "| 1.000 | 0.50 | 0.25 |" in report.render_conversion(tmp_path)  # the original in its faster layout


def test_every_network_to_convert_takes_a_step():
    """Kills: a network that is not converted; a twin of the library's that computes something else in size."""
    for name, network in conversion.NETWORKS.items():
        if name != "tiramisu":
            pytest.importorskip({"encoder": "timm"}.get(name, name))
        for mode in conversion.modes_of(network):
            cell = {"network": name, "mode": mode, "batch_size": 2, "image_size": 32, "device": "cpu"}
            model, x, loss = conversion.build({**cell, "channels_last": True})
            if mode in ("fused", "lean"):
                assert {plan.runs for plan in execution_plan(model)} == {mode}
            output = model.eval()(x)
            shapes = [tuple(one.shape) for one in (output if isinstance(output, list) else [output])]
            assert mode == "original" or shapes == expected, (name, mode)
            expected = shapes
            loss(output).backward()
            assert any(p.grad is not None for p in model.parameters())


@pytest.mark.skipif(len(scaling.cores()) < 2, reason="two processes need two cores")
def test_the_scaling_benchmark_runs_processes_together(tmp_path, capfd):
    """Kills: a process that waits for ever, times of one process alone, settings that are not applied."""
    flags = "--depth 10 --batch_size 2 --image_size 8 --rounds 2 --processes 1,2 --ddp default,bucket_view --output"
    command = [sys.executable, "benchmarks/scaling.py", *flags.split(), f"{tmp_path}/s.csv"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "s.csv")
    exchanging = [("2", kind, options) for kind in scaling.BATCH_NORM for options in ("default", "bucket_view")]
    assert [(row["processes"], row["batch_norm"], row["ddp"]) for row in rows] == [
        ("1", "plain", "none"), ("2", "plain", "none"), *exchanging
    ]  # fmt: skip
    assert all(row["status"] == "ok" and float(row["images_per_s"]) > 0 < float(row["peak_mib"]) for row in rows)
    assert float(rows[0]["efficiency"]) == 1 and float(rows[1]["communication"]) == 0
    assert len(done.stdout.splitlines()) == 2 + len(rows)


def test_scaling_is_measured_by_one_process_and_by_no_exchange():
    """Kills: an efficiency of all processes together, communication measured by one process alone."""
    one, apart, exchanging = ({"mode": "fused", "processes": n, "batch_norm": "plain", "ddp": ddp, "batch_size": 8}
                              for n, ddp in ((1, "none"), (2, "none"), (2, "default")))  # fmt: skip
    rows = scaling.summaries([one, apart, exchanging], [[100.0, 200.0], [110.0, 220.0], [125.0, 250.0]])
    assert rows[2] == {
        "step_ms": 187.5, "fastest_ms": 125.0, "images_per_s": 85.3, "speed_up": 1.6, "efficiency": 0.8,
        "fastest_efficiency": 0.8, "communication": 0.12,
    }  # fmt: skip


def test_times_become_a_median_and_a_fastest_ratio():
    """The median is over the rounds' ratios, the fastest steps are of any round.

    Kills: the ratio of the medians (0.6), the least of the rounds' ratios (0.25), the first step as the fastest.
    """
    assert speed.summary([22.0, 10.0, 12.0], [20.0, 40.0, 5.0]) == {
        "step_ms": 12.0, "spread_ms": 12.0, "fastest_ms": 10.0, "ratio": 1.1, "fastest_ratio": 2.0,
    }  # fmt: skip
    assert set(speed.summary([], [1.0]).values()) == {None}
    without_reference = speed.summary([3.0, 1.0], [])
    assert without_reference["fastest_ms"] == 1.0 and without_reference["fastest_ratio"] is None


@pytest.mark.parametrize("inference", [False, True])
def test_inference_is_the_forward_pass_in_evaluation(inference, monkeypatch, tmp_path):
    """Kills: inference with gradients or in training mode; a training step in evaluation mode."""
    build, models, outputs = speed.build, [], []

    def watched(cell):
        model, x, loss = build(cell)
        models.append(model)
        model.register_forward_hook(lambda module, inputs, output: outputs.append((module.training, output)))
        return model, x, loss

    monkeypatch.setattr(speed, "build", watched)
    arguments = f"--depth 10 --batch_size 2 --image_size 8 --rounds 1 --inference {inference} --output {tmp_path}/s.csv"
    speed.main(arguments.split())
    assert {row["inference"] for row in read(tmp_path / "s.csv")} == {str(inference)}
    assert len(outputs) == 2 * len(models) > 0  # one warms up
    assert all(training is not inference for training, _ in outputs)
    assert all(output.requires_grad is not inference for _, output in outputs)
    assert all((p.grad is None) is inference for model in models for p in model.parameters())


def test_a_row_names_the_instruction_set(monkeypatch):
    """Kills: a row that hides what the environment took from the processor, and a command that does not do it again."""
    capability = torch.backends.cpu.get_cpu_capability()
    for name in measure.INSTRUCTIONS:
        monkeypatch.delenv(name, raising=False)
    found = measure.environment("cpu")
    assert found["cpu_capability"] == capability and found["command"].startswith("python ")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found = measure.environment("cpu")
    assert found["cpu_capability"] == f"{capability} (ONEDNN_MAX_CPU_ISA=AVX2)"
    assert found["command"].startswith("ONEDNN_MAX_CPU_ISA=AVX2 python ")


ROW = {
    "model": "densenet_bc", "depth": 100, "layers": 48, "growth_rate": 12, "batch_size": 64, "image_size": 32,
    "spatial_dims": 2, "dtype": "float32", "device": "cpu", "channels_last": False, "mode": "naive",
}  # fmt: skip
CONDITIONS = {
    "hardware": "an abacus", "cpu_capability": "BEADS", "threads": 2, "torch": "2.9", "python": "3.12",
    "commit": "abc", "command": "python m",
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """Rows of two modes, and a README with the markers."""
    ok = {"status": "ok", **CONDITIONS}
    naive = {"kept_mib": 2000, "peak_mib": 2100.4}
    block = {"model": "dense_block", "depth": "", "batch_size": 4}
    memory_rows = [
        {**ROW, **naive, **ok},
        {**ROW, "mode": "checkpoint", "kept_mib": 600.5, "peak_mib": 700, **ok},
        {**ROW, "mode": "fused", "kept_mib": "", "peak_mib": "", **ok, "status": "out of memory"},
        {**ROW, "depth": 40, "layers": 18, **naive, **ok},
        *[{**ROW, **block, "layers": n, "kept_mib": n * n, "peak_mib": 2 * n * n, **ok} for n in (8, 16)],
        *[{**ROW, **block, "mode": "checkpoint", "layers": n, "kept_mib": n, "peak_mib": n, **ok} for n in (8, 16)],
    ]
    timed = {"rounds": 5, "step_ms": 1000, "spread_ms": 20, "inference": False, "fastest_ratio": 1.0, **ok}
    speed_rows = [
        {**ROW, "channels_last": True, "ratio": 1.0, **timed},
        {**ROW, "channels_last": False, "ratio": 1.25, **timed},
        {**ROW, "mode": "checkpoint", "channels_last": True, "ratio": 1.5, **timed},
        {**ROW, "mode": "checkpoint", "channels_last": False, "ratio": 1.375, **timed, "fastest_ratio": 1.253},
    ]
    alone = {**timed, "rounds": 9, "commit": "def"}
    alone_rows = [
        {**ROW, "mode": mode, "ratio": ratio, **alone, "fastest_ratio": 0.5, **what}
        for what in ({"batch_size": 2}, {"inference": True})
        for mode, ratio in (("naive", 1.0), ("checkpoint", 0.75))
    ]
    folder = tmp_path / "results"
    folder.mkdir()
    measure.write_rows(str(folder / "memory.csv"), memory_rows)
    measure.write_rows(str(folder / "speed.csv"), speed_rows)
    measure.write_rows(str(folder / "speed_alone.csv"), alone_rows)
    (tmp_path / "README.md").write_text(f"# Title\n{report.BEGIN}\nold\n{report.END}\nend\n")
    return folder


def test_the_report_is_made_from_the_rows(results):
    readme = results.parent / "README.md"
    arguments = ["--results", str(results), "--readme", str(readme)]
    report.main(arguments)
    text = readme.read_text()
    assert text.startswith(f"# Title\n{report.BEGIN}\n") and text.endswith(f"\n{report.END}\nend\n")
    assert "old" not in text
    assert (
        "DenseNet-BC(100,12), batch 64, 32x32: a training step peaks at **700 MiB** with `checkpoint`, at 2,100 MiB in "
        "plain PyTorch; `checkpoint` takes **1.38** of plain PyTorch's time." in text.replace("\n", " ")
    )
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| training step | mode | kept after forward | peak | of naive | time, BEADS |",
        "|---|---|--:|--:|--:|--:|",
        "| DenseNet-BC(100,12), batch 64, 32x32 | `naive` | 2,000 MiB | 2,100 MiB | 1.000 | 1 |",
        "|  | `checkpoint` | 600 MiB | 700 MiB | 0.333 | 1.38 / 1.25 |",
        "|  | `fused` |  | out of memory |  |  |",
        "| time | `checkpoint` |",
        "|---|--:|",
        "| DenseNet-BC(100,12), batch 2, 32x32, training step, BEADS | 0.75 / 0.50 |",
        "| DenseNet-BC(100,12), batch 64, 32x32, inference, BEADS | 0.75 / 0.50 |",
    ]  # depth 40 was not timed; of two layouts the faster one is shown
    assert "16 layers against 8: `naive` x 4.00; `checkpoint` x 2.00." in text
    measured_on = [line for line in text.splitlines() if line.startswith("*")]
    assert measured_on == ["* an abacus, BEADS, 2 threads, float32, torch 2.9, Python 3.12, commits abc, def"]
    assert "median of 5 or 9 rounds" in text.replace("\n", " ")
    assert "(results/memory.png)" in text
    assert (results / "memory.png").read_bytes().startswith(b"\x89PNG")
    report.main(arguments)
    assert readme.read_text() == text


def test_instruction_sets_have_columns_of_their_own(results):
    """And rows that do not name one are not given one. Kills: ratios of two processors mixed; an invented name."""
    rows = read(results / "speed.csv")
    other = [row | {"ratio": "2.5", "fastest_ratio": "2.25", "cpu_capability": "COGS"} for row in rows]
    unnamed = ("cpu_capability", "fastest_ratio", "inference")
    older = [{column: row[column] for column in row if column not in unnamed} for row in rows]
    measure.write_rows(str(results / "speed.csv"), rows + other)
    measure.write_rows(str(results / "speed_older.csv"), older)
    text = report.render(results, "memory.png")
    header, _, naive, checkpoint = [line for line in text.splitlines() if line.startswith("|")][:4]
    assert header.endswith("| of naive | time, BEADS | time, COGS | time |")
    assert naive.endswith("| 1.000 | 1 | 1 | 1 |")
    assert checkpoint.endswith("| 0.333 | 1.38 / 1.25 | 2.50 / 2.25 | 1.38 |")
    headline = text.partition("|")[0].replace("\n", " ")
    assert "time (BEADS); `checkpoint` takes **2.50** of plain PyTorch's time (COGS); `checkpoint` takes" in headline
    assert headline.rstrip().endswith("**1.38** of plain PyTorch's time.")
    assert "* an abacus, 2 threads, float32, torch 2.9, Python 3.12, commit abc\n" in text


def test_the_readme_shows_the_rows_that_are_committed():
    """Kills: a number that was typed, or rows that were made again and not shown."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(report.parts(text)) == set(report.PARTS)
    for name, render in report.PARTS.items():
        figures = report.figures(name, ROOT / "benchmarks" / "results" / "memory.png", ROOT / "README.md")
        assert report.split(text, name)[1] == render(ROOT / "benchmarks" / "results", *figures), name
    assert (ROOT / "benchmarks" / "results" / "memory.png").is_file()


# Mistakes


@pytest.mark.parametrize(
    "command, arguments, names",
    [
        ("memory", "--depht 40", "--depht"),
        ("memory", "forty", "forty"),
        ("memory", "--depths 41", "41"),
        ("memory", "--depths deep", "deep"),
        ("memory", "--modes naive,fast", "fast"),
        ("memory", "--modes torchvision", "torchvision"),
        ("memory", "--model resnet50", "resnet50"),
        ("memory", "--model densenet121 --depths 40", "depths"),
        ("memory", "--model densenet121 --blocks 4", "blocks"),
        ("memory", "--model densenet121 --growth_rate 3", "growth_rate"),
        ("memory", "--model densenet121 --image_size 8", "image_size"),
        ("memory", "--batch_size 0", "batch_size"),
        ("memory", "--batch_size 1.5", "1.5"),
        ("memory", "--dtype int8", "int8"),
        ("memory", "--device tpu", "tpu"),
        ("memory", "--channels_last maybe", "maybe"),
        ("memory", "--channels_last --spatial_dims 1", "spatial_dims"),
        ("memory", "--output rows.txt", "rows.txt"),
        ("memory", "--output missing/rows.csv", "missing"),
        ("memory", "--figure f.png --depths 40 --blocks 0", "two depths"),
        ("speed", "--round 3", "--round"),
        ("speed", "--rounds 0", "rounds"),
        ("speed", "--layouts sideways", "sideways"),
        ("speed", "--inference maybe", "maybe"),
        ("speed", "--model densenet121 --depth 121", "depth"),
        ("speed", "--depth 11", "11"),
        ("cuda_counts", "--dtype bfloat16", "float32, bf16, fp16"),
        ("cuda_counts", "--device cuda:1", "cuda:1"),
        ("cuda_counts", "--model densenet121 --depth 121", "depth"),
        ("cuda_counts", "--depth 11", "11"),
        ("cuda_counts", "--channels_last maybe", "maybe"),
        ("conversion", "--networks torchvision,resnet", "resnet"),
        ("conversion", "--modes naive", "naive"),
        ("conversion", "--time maybe", "maybe"),
        ("conversion", "--image_size 16", "image_size"),
        ("conversion", "--rounds 0", "rounds"),
        ("conversion", "--output rows.txt", "rows.txt"),
        ("report", "--results missing", "missing"),
        ("report", "--readme missing.md", "missing.md"),
        ("report", "--readme empty.md", "benchmark:begin"),
        ("report", "--redme README.md", "--redme"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command, arguments, names, results, monkeypatch, capsys):
    monkeypatch.chdir(results.parent)
    Path("empty.md").touch()
    before = sorted(results.parent.rglob("*"))
    defaults = ["--results", str(results)] if command == "report" and "--results" not in arguments else []
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[command].main([*arguments.split(), *defaults])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == ""
    assert re.fullmatch(r"error: .+\n", err) and names in err
    assert sorted(results.parent.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[command].main(["--help"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 0 and err == ""
    settings = COMMANDS[command].Settings
    for name in settings.__dataclass_fields__:
        explanation = out.partition(f"--{name}=")[2].partition("\n    -")[0].strip().splitlines()[-1].strip()
        assert explanation.endswith(".") and not explanation.startswith(("Type: ", "Default: ")), (name, explanation)


# The check of a GPU


def of_dry_run(*checks: str) -> list[dict]:
    """The first cell of each of these checks."""
    cells = gpu_check.Settings(dry_run=True).cells()
    return [next(cell for cell in cells if cell["check"] == check) for check in checks]


def test_the_gpu_check_s_order_is_that_of_its_parts(monkeypatch):
    """Every cell has a name of its own, by which a later call knows it. Kills: a part that hides behind a slow one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for settings in (gpu_check.Settings(dry_run=True), gpu_check.Settings()):
        cells = settings.cells()
        assert len({cell["name"] for cell in cells}) == len(cells)
        parts = [cell["part"] for cell in cells]
        assert parts == sorted(parts) and set(parts) == set("abcd")
        assert cells[0]["check"] == "kernels"
        times = [cell for cell in cells if cell["check"] == "time"]
        assert "execution" not in times[0] and "execution" in times[-1] or not settings.dry_run
        assert {cell["execution"] for cell in times if "execution" in cell} >= {"compiled", "compiled, budget 0.3"}


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_the_gpu_check_s_device_can_be_made_the_current_one(device, monkeypatch):
    """Kills: a device without a number, which ``torch.cuda.set_device`` refuses in every cell."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = gpu_check.Settings(device=device)
    assert torch.device(settings.device).index == (1 if device == "cuda:1" else 0)
    assert {cell["device"] for cell in settings.cells()} == {settings.device}


def test_the_gpu_check_finds_operators_and_kernels_in_a_profile():
    """As they appear on a GPU. Kills: kernels of our own that are left out, as no operator's name is theirs."""
    events = [
        SimpleNamespace(key="aten::mm", self_device_time_total=10.0, device_time_total=10.0),
        SimpleNamespace(key="aten::convolution", self_device_time_total=0.0, device_time_total=40.0),
        SimpleNamespace(key="product_gradient", self_device_time_total=20.0, device_time_total=20.0),
        SimpleNamespace(key="ampere_sgemm_128x64", self_device_time_total=10.0, device_time_total=10.0),
    ]
    moved = {"aten::mm": [1e6, 2], "aten::convolution": [4e6, 1], "efficient_densenet::product_gradient": [1e6, 3]}
    rows = list(gpu_check._of_copies(events, moved, 1e11, cuda=True))
    assert [(row["operator"], row["device_ms"], row["of_copy"]) for row in rows] == [
        ("aten::mm", 0.01, 1.0), ("aten::convolution", 0.04, 1.0), ("efficient_densenet::product_gradient", 0.02, 0.5)
    ]  # fmt: skip


def test_the_gpu_check_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """Rows as they come, none made twice; the report names every part. Kills: a rerun that starts from the beginning."""
    cells = of_dry_run("time", "largest batch", "operators")
    output = tmp_path / "check.csv"
    settings = gpu_check.Settings(dry_run=True, output=str(output))
    asked = []

    def filled(row: dict[str, str]) -> dict[str, str]:
        return {column: value for column, value in row.items() if value}

    monkeypatch.setattr(gpu_check.Settings, "cells", lambda self: cells[: len(asked)])
    for cell in cells:
        asked.append(cell)
        before = read(output) if output.exists() else []
        gpu_check.run(settings)
        rows = read(output)
        assert list(map(filled, rows[: len(before)])) == list(map(filled, before))  # with their seconds
        assert {row["name"] for row in rows[len(before) :]} == {cell["name"]}
        assert rows[-1]["check"] == gpu_check.ENDED and rows[-1]["status"] == "ok"
    assert gpu_check.run(settings) and read(output) == rows
    timed = [row for row in rows if row["check"] == "time"]
    assert {(row["mode"], row["execution"]) for row in timed if row["status"] == "ok"} == {
        (mode, "eager") for mode in ("naive", *gpu_check.LIBRARY)
    }
    assert all(row["step_ms"] and row["peak_mib"] for row in timed if row["status"] == "ok")
    assert {row["status"] for row in timed if row["execution"] == "graphed"} == {"skipped: CUDA graphs need a GPU"}
    batches = [int(row["largest_batch"]) for row in rows if row["check"] == "largest batch"]
    assert len(batches) == 2 and batches[0] < batches[1]
    report = (tmp_path / "check.md").read_text()
    assert "Nothing is wrong." in report and all(cell["name"].partition(",")[0] in report for cell in cells)
    assert capsys.readouterr().out.rstrip().endswith("complete")


def test_the_gpu_check_leaves_what_the_time_does_not_allow(tmp_path, capsys):
    settings = gpu_check.Settings(dry_run=True, minutes=0.01, output=str(tmp_path / "check.csv"))
    assert gpu_check.run(settings) == []
    count = len(settings.cells())
    assert f"{count} of {count} parts are left for the next call" in capsys.readouterr().out


def test_the_gpu_check_s_report_begins_with_what_is_wrong():
    where = dict.fromkeys(gpu_check.WHERE, "here")
    rows = [
        {"name": "(a) kernels", "check": "kernels", "operator": "correct", "dtype": "float32", "status": status, **where}
        for status in ("ok", "differs by 3.0")
    ]
    report = gpu_check.report(rows)
    assert "1 of 2 rows are not as they should be:" in report
    assert report.index("correct: differs by 3.0") < report.index("## Kernels against the plain path")


# Cells


def take_too_much(cell):
    return {"bytes": torch.empty(2**60).nbytes}


def be_killed(cell):
    os.kill(os.getpid(), signal.SIGKILL)


def make_a_mistake(cell):
    raise KeyError("depth")


def remember(cell):
    first = not hasattr(torch, "been_here")
    torch.been_here = True
    return {"first": first}


@pytest.mark.parametrize("function", [take_too_much, be_killed])
def test_out_of_memory_is_a_row(function):
    assert measure.run_in_fresh_process(function, {"depth": 40}) == {"depth": 40, "status": "out of memory"}


def test_another_error_in_a_cell_is_reported():
    with pytest.raises(RuntimeError, match="KeyError: 'depth'"):
        measure.run_in_fresh_process(make_a_mistake, {})


def test_every_cell_has_a_fresh_process():
    assert [measure.run_in_fresh_process(remember, {}) for _ in range(2)] == [{"first": True, "status": "ok"}] * 2


@pytest.mark.parametrize("mode", ["checkpoint", "naive"])
def test_out_of_memory_is_a_row_of_the_speed_benchmark(mode, monkeypatch, capsys):
    """Of a mode, and of the plain model, without which there are times and no ratios."""
    build = speed.build

    def failing(cell):
        model, x, loss = build(cell)
        return (model, x, loss if cell["mode"] != mode else lambda output: torch.empty(2**60))

    monkeypatch.setattr(speed, "build", failing)
    settings = speed.Settings(
        modes="checkpoint", depth=10, batch_size=2, image_size=8, layouts="contiguous", rounds=1
    )
    rows = speed.run(settings)
    assert [(row["mode"], row["status"], row["ratio"], row["fastest_ratio"]) for row in rows] == {
        "checkpoint": [("naive", "ok", 1.0, 1.0), ("checkpoint", "out of memory", None, None)],
        "naive": [("naive", "out of memory", None, None), ("checkpoint", "ok", None, None)],
    }[mode]


# Baselines


def test_the_concatenating_baseline_computes_the_same_numbers():
    """All but the running statistics, which the known method moves twice."""
    expected, found = training_state(toy(), images()), training_state(measure.concatenated(toy()), images())
    moved = {name for name in expected if "running" in name or "tracked" in name}
    assert_same(*({name: state[name] for name in state if name not in moved} for state in (expected, found)))


@pytest.mark.parametrize("model", ["densenet_bc", "densenet121", "densenet3d", "dense_block"])
def test_every_cell_takes_a_training_step(model):
    modes = ["torchvision"] if model == "densenet121" else measure.modes_of(model)
    for mode in modes:
        cell = {
            **ROW, "model": model, "mode": mode, "depth": 10, "layers": 2, "growth_rate": 4, "batch_size": 2,
            "image_size": 32, "spatial_dims": 3 if model == "densenet3d" else 2, "channels_last": True,
        }  # fmt: skip
        network, x, loss = measure.build(cell)
        loss(network(x)).backward()
        assert all(p.grad is not None for p in network.parameters())

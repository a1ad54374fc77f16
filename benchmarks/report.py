"""The README's tables and figure, made from the rows under benchmarks/results.

python benchmarks/report.py
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion import NETWORKS
from measure import ROOT, read_rows, size, start, title

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
MARKER = re.compile(r"<!-- (\w+):(begin|end) -->")
KNOWN = {
    "concatenation": "`torch.utils.checkpoint`, concatenating",
    "torchvision": "torchvision, `memory_efficient=True`",
}
CACHES = 1.8  # bandwidth of a GPU's second-level cache against its memory's, as assumed
STEP = ("model", "depth", "growth_rate", "batch_size", "image_size", "spatial_dims", "dtype", "device")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Rewrite the README's parts between markers, and its figure, from the rows of the benchmarks.

    Args:
        results: Folder of the rows, memory*.csv, speed*.csv and so on; the figure memory.png goes there.
        readme: The file; what stands between its pairs of marker comments is replaced.
    """

    results: str = str(ROOT / "benchmarks" / "results")
    readme: str = str(ROOT / "README.md")

    def __post_init__(self):
        if not list(Path(self.results).glob("memory*.csv")):
            raise ValueError(f"results={self.results!r} holds no memory*.csv; benchmarks/memory.py --output writes one")
        if not Path(self.readme).is_file():
            raise ValueError(f"readme={self.readme!r} is not a file")
        text = Path(self.readme).read_text(encoding="utf-8")
        split(text)
        parts(text)


def split(text: str, name: str = "benchmark") -> tuple[str, str, str]:
    """A text before, between and behind the markers of one part.

    Raises:
        ValueError: it does not have exactly one pair of them.
    """
    begin, end = BEGIN.replace("benchmark", name), END.replace("benchmark", name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"the README needs one line {begin} and below it one line {end}")
    before, _, rest = text.partition(begin)
    between, _, after = rest.partition(end)
    return before, between, after


def parts(text: str) -> list[str]:
    """The names of the parts that a text has markers for.

    Raises:
        ValueError: a part that nothing here makes.
    """
    names = list(dict.fromkeys(name for name, _ in MARKER.findall(text)))
    for name in names:
        if name not in PARTS:
            raise ValueError(f"the README has markers for {name!r}; there are {', '.join(PARTS)}")
        split(text, name)
    return names


def rows_of(results: str | Path, kind: str) -> list[dict[str, str]]:
    """All rows of ``memory*.csv`` or ``speed*.csv``, DenseNet-BC's file first."""
    paths = sorted(Path(results).glob(f"{kind}*.csv"), key=lambda path: ("densenet_bc" not in path.name, path.name))
    return [row for path in paths for row in read_rows(path)]


def render(results: str | Path, figure: str) -> str:
    """The Markdown between the markers.

    Args:
        results: folder of the rows.
        figure: the figure's address as the README writes it.
    """
    memory, speed = rows_of(results, "memory"), rows_of(results, "speed")
    times, timed = best_times(speed), set(map(step_of, speed))
    shown = [row for row in memory if step_of(row) in timed]
    measured = set(map(step_of, shown))
    processors = list(dict.fromkeys(processor(row) for row in speed if step_of(row) in measured))
    naive = {step_of(row): float(row["peak_mib"]) for row in shown if row["mode"] == "naive" and row["peak_mib"]}

    lines = [
        headline(shown, times, processors),
        "",
        "| training step | mode | kept after forward | peak | of naive "
        + "".join(f"| {f'time, {on}' if on else 'time'} " for on in processors) + "|",
        "|---|---|--:|--:|--:|" + "--:|" * len(processors),
    ]  # fmt: skip
    for row in shown:
        step, mode = step_of(row), row["mode"]
        cells = [f"{title(row)}, {size(row)}" if mode == "naive" else "", KNOWN.get(mode, f"`{mode}`")]
        if row["status"] == "ok":
            peak = float(row["peak_mib"])
            cells += [f"{float(row['kept_mib']):,.0f} MiB", f"{peak:,.0f} MiB", f"{peak / naive[step]:.3f}"]
        else:
            cells += ["", row["status"], ""]
        cells += [ratios(times, step, on, mode) for on in processors]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *time_table([row for row in speed if step_of(row) not in measured], times)]

    rounds = sorted({int(row["rounds"]) for row in speed})
    counts = " or ".join(map(str, rounds)).replace(" or ", ", ", max(len(rounds) - 2, 0))
    lines += [
        wrapped(
            "Peak: the most that is allocated in one step of forward, loss and backward, parameters left out, their "
            "gradients in. Time: as a ratio to the plain model in channels-last, every mode in its faster memory "
            f"layout, all modes in turn in one run; median of {counts} rounds / ratio of the fastest steps, which a "
            "shared machine's slow minutes move less. Measured on:"
        ),
        "",
        *conditions(shown + speed),
        "",
        f"![Memory of a training step over depth, for every mode]({figure})",
        "",
        growth(memory),
    ]
    commands = dict.fromkeys(row["command"] for row in memory + speed)
    return "\n".join(["", *lines, "", "Made by:", "", "```bash", *commands, "python benchmarks/report.py", "```", ""])


def time_table(rows: list[dict[str, str]], times: dict[tuple, dict[str, str]]) -> list[str]:
    """A table of what was timed and has no row of memory: small steps, inference. Nothing without such rows."""
    if not rows:
        return []
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["mode"] != "naive"))
    names = [KNOWN.get(mode, f"`{mode}`") for mode in modes]
    lines = [f"| time | {' | '.join(names)} |", "|---|" + "--:|" * len(modes)]
    for (step, on), row in {(step_of(row), processor(row)): row for row in rows}.items():
        work = f"{title(row)}, {size(row)}, {'inference' if inference(row) else 'training step'}"
        cells = [f"{work}, {on}" if on else work, *(ratios(times, step, on, mode) for mode in modes)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def headline(shown: list[dict[str, str]], times: dict[tuple, dict[str, str]], processors: list[str]) -> str:
    """The first network in a sentence: plain PyTorch against the mode of least memory and the fastest one."""
    first = step_of(shown[0])
    modes = [row for row in shown if step_of(row) == first and row["status"] == "ok" and row["mode"] not in KNOWN]
    naive, *library = sorted(modes, key=lambda row: row["mode"] != "naive")
    least = min(library, key=lambda row: float(row["peak_mib"]))
    taken = []
    for on in processors:
        timed = [times[key] for row in library if (key := (first, on, row["mode"])) in times]
        if timed:
            fastest = min(timed, key=lambda row: float(row["ratio"]))
            where = f" ({on})" if on and len(processors) > 1 else ""
            taken.append(f"`{fastest['mode']}` takes **{float(fastest['ratio']):.2f}** of plain PyTorch's time{where}")
    return wrapped(
        f"{title(naive)}, {size(naive)}: a training step peaks at **{float(least['peak_mib']):,.0f} MiB** with "
        f"`{least['mode']}`, at {float(naive['peak_mib']):,.0f} MiB in plain PyTorch"
        f"{''.join(f'; {sentence}' for sentence in taken)}."
    )


def render_counts(results: str | Path) -> str:
    """The Markdown of what a step on a GPU would do, as counted by cuda_counts.py."""
    rows = rows_of(results, "cuda_counts")
    lines = [
        "| training step on CUDA, counted | mode | launches | of naive | bytes | of naive | loads | peak | of naive |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    bounds = []
    naive: dict[str, str] = {}
    for row in rows:
        if row["mode"] == "naive":
            naive = row
        launches, bytes_, loads, peak = (
            float(row[column]) for column in ("launches", "bytes", "loaded_bytes", "peak_bytes")
        )
        columns = ("launches", "bytes", "peak_bytes")
        share = {column: f"{float(row[column]) / float(naive[column]):.3f}" for column in columns}
        what = f"{title(row)}, {size(row)}, {row['dtype']}" if row["mode"] == "naive" else ""
        cells = [
            what, KNOWN.get(row["mode"], f"`{row['mode']}`"), f"{launches:,.0f}", share["launches"],
            f"{bytes_ / 1e9:.1f} GB", share["bytes"], f"{loads / 1e9:.1f} GB",
            f"{peak / 2**20:,.0f} MiB", share["peak_bytes"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        if row["mode"] == "fused":
            written = float(row["written_bytes"])
            bounds.append((bytes_ / float(naive["bytes"]), (loads + written) / CACHES / float(naive["bytes"])))
    waits = {int(row["host_waits"]) for row in rows}
    least, most = min(low for low, _ in bounds), max(max(bound) for bound in bounds)
    note = (
        f"Host waits: {' to '.join(map(str, sorted({min(waits), max(waits)})))}. Bytes: every element that a launch "
        "reads or writes, once. Loads: what the kernels' loads ask for, with what several of them read again and the caches "
        "have; of torch's own kernels, every element once. Estimated from this alone, and measured nowhere: a `fused` "
        f"step takes between {least:.2f} and {most:.2f} of plain PyTorch's time where memory sets the pace, the lower "
        f"bound where caches serve all repeated loads at no cost, the upper one where they come at {CACHES} times "
        "the memory's bandwidth."
    )
    commands = dict.fromkeys(row["command"] for row in rows)
    return "\n".join(["", *lines, "", wrapped(note), "", "```bash", *commands, "```", ""])


def render_conversion(results: str | Path) -> str:
    """The Markdown of other people's networks, before and after: peaks, and times where there are any."""
    peaks, times = rows_of(results, "conversion_peaks"), rows_of(results, "conversion_times")
    timed: dict[tuple[str, ...], dict[str, str]] = {}
    for row in sorted((row for row in times if row["ratio"]), key=lambda row: float(row["ratio"])):
        timed.setdefault((row["network"], processor(row), row["mode"]), row)
    processors = list(dict.fromkeys(processor(row) for row in times))
    columns = [f"{what}, {on}" for on in processors for what in ("time", "of fastest")]
    lines = [
        f"| network, training step | mode | peak | of original {''.join(f'| {column} ' for column in columns)}|",
        f"|---|---|--:|--:|{'--:|' * len(columns)}",
    ]
    original = {row["network"]: row["peak_mib"] for row in peaks if row["mode"] == "original"}
    for row in peaks:
        network, mode, first = NETWORKS[row["network"]], row["mode"], original[row["network"]]
        names = {"original": "as it is", "own flag": f"`{network.flag}`"}
        own = f"this library's, `{mode.split()[-1]}`" if mode.startswith("library") else f"`{mode}`"
        cells = [f"{network.title}, {size(row)}" if mode == "original" else "", names.get(mode, own)]
        if row["status"] == "ok":
            peak = float(row["peak_mib"])
            cells += [f"{peak:,.0f} MiB", f"{peak / float(first):.3f}" if first else ""]
        else:
            cells += [row["status"], ""]
        for on in processors:
            found = timed.get((row["network"], on, mode), {})
            cells += [f"{float(found[name]):.2f}" if found else "" for name in ("ratio", "fastest_ratio")]
        lines.append(f"| {' | '.join(cells)} |")
    if times:
        rounds = " or ".join(map(str, sorted({int(row["rounds"]) for row in times})))
        lines += ["", wrapped(
            "Time: as a ratio to the original in channels-last, all modes in turn in one run; the original in its faster "
            f"layout, all others in channels-last; median of {rounds} rounds, and ratio of the fastest steps."
        )]  # fmt: skip
    lines += ["", *conditions(peaks + times), "", "```bash"]
    return "\n".join(["", *lines, *dict.fromkeys(row["command"] for row in peaks + times), "```", ""])


def step_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What was done: the columns that rows of memory and of time must share to stand in one line."""
    return (*(str(row[column]) for column in STEP), str(inference(row)))


def inference(row: dict[str, str]) -> bool:
    return row.get("inference") == "True"


def processor(row: dict[str, str]) -> str:
    """What a row's ratios hold for: a GPU, or the CPU's instruction set; empty where an older row does not say it."""
    return row.get("cpu_capability") or "" if row["device"] == "cpu" else row["hardware"]


def best_times(speed: list[dict[str, str]]) -> dict[tuple, dict[str, str]]:
    """By step, processor and mode: the row of the faster memory layout."""
    times: dict[tuple, dict[str, str]] = {}
    for row in sorted((row for row in speed if row["ratio"]), key=lambda row: float(row["ratio"])):
        times.setdefault((step_of(row), processor(row), row["mode"]), row)
    return times


def ratios(times: dict[tuple, dict[str, str]], step: tuple, on: str, mode: str) -> str:
    """A cell of the table: the median ratio / that of the fastest steps; empty where nothing was timed."""
    row = times.get((step, on, mode), {})
    if mode == "naive":
        return "1" if row else ""
    return " / ".join(f"{float(row[column]):.2f}" for column in ("ratio", "fastest_ratio") if row.get(column))


def conditions(rows: list[dict[str, str]]) -> list[str]:
    """A line of Markdown for every environment, its commits together."""
    commits: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        where = [processor(row), f"{row['threads']} threads"] if row["device"] == "cpu" else []
        parts = [row["hardware"], *where, row["dtype"], f"torch {row['torch']}", f"Python {row['python']}"]
        commits[", ".join(filter(None, parts))][row["commit"]] = None
    return [f"* {where}, commit{'s' * (len(known) > 1)} {', '.join(known)}" for where, known in commits.items()]


def growth(rows: list[dict[str, Any]]) -> str:
    """The law of growth in a sentence: bytes kept by a dense block, its number of layers doubled."""
    parts = []
    for mode, points in curves(rows, "dense_block", "layers", "kept_mib").items():
        (fewer, less), (more, kept) = points[-2:]
        parts.append(f"{KNOWN.get(mode, f'`{mode}`')} x {kept / less:.2f}")
    case = f"Kept by one dense block at a fixed growth rate, {more} layers against {fewer}"
    return wrapped(f"{case}: {'; '.join(parts)}.")


def wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 120, break_long_words=False, break_on_hyphens=False)


def curves(rows: list[dict[str, Any]], model: str, x: str, y: str) -> dict[str, list[tuple[int, float]]]:
    """Points of each mode, by the size of the model; modes with one point or none are left out."""
    found = defaultdict(list)
    for row in rows:
        if row["model"] == model and row["status"] == "ok":
            found[row["mode"]].append((int(row[x]), float(row[y])))
    return {mode: sorted(points) for mode, points in found.items() if len(points) > 1}


def slope(points: list[tuple[int, float]]) -> float:
    """Of the last two points in double logarithmic axes: the power with which the memory grows."""
    (x0, y0), (x1, y1) = points[-2:]
    return math.log(y1 / y0) / math.log(x1 / x0)


def draw_memory(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Memory over depth: the peak of whole networks, and what one dense block keeps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (model, x, y, label, heading)
        for model, x, y, label, heading in (
            ("densenet_bc", "depth", "peak_mib", "peak of the step, MiB", "DenseNet-BC, by depth"),
            ("dense_block", "layers", "kept_mib", "kept after forward, MiB", "one dense block, by its layers"),
        )
        if curves(rows, model, x, y)
    ]
    colours = {mode: f"C{i}" for i, mode in enumerate(dict.fromkeys(row["mode"] for row in rows))}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.9), squeeze=False, layout="constrained")
    for axis, (model, x, y, label, heading) in zip(axes[0], panels):
        row = next(row for row in rows if row["model"] == model)
        for mode, points in curves(rows, model, x, y).items():
            xs, ys = zip(*points)
            name = KNOWN.get(mode, mode).replace("`", "")
            axis.plot(xs, ys, "o-", color=colours[mode], label=f"{name}: slope {slope(points):.2f}")
        axis.set(xlabel=x, ylabel=label)
        axis.set_xscale("log")
        axis.set_yscale("log", base=2)
        axis.set_title(f"{heading}\nk = {row['growth_rate']}, {size(row)}, {row['dtype']}", fontsize=10)
        ticks = sorted({point[0] for points in curves(rows, model, x, y).values() for point in points})
        axis.set_xticks(ticks, map(str, ticks))
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.yaxis.set_major_formatter("{x:,.0f}")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
    temporary = f"{path}.tmp"
    figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)
    os.replace(temporary, path)


def render_scaling(results: str | Path) -> str:
    """The Markdown of the rows of scaling.py."""
    rows = rows_of(results, "scaling")
    lines = [
        "| processes | BatchNorm | DistributedDataParallel | images/s | speed-up | efficiency | exchange | peak of each |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        efficiency = " / ".join(f"{float(row[column]):.3f}" for column in ("efficiency", "fastest_efficiency"))
        ddp = "" if row["ddp"] == "none" else f"`{row['ddp']}`"
        cells = [
            row["processes"], row["batch_norm"], ddp, f"{float(row['images_per_s']):.1f}",
            f"{float(row['speed_up']):.2f}", efficiency, f"{float(row['communication']):.3f}",
            f"{float(row['peak_mib']):,.0f} MiB",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    note = (
        f"{title(first)}, {size(first)} per process, `{first['mode']}`, one thread each, {processor(first)}; in turn in "
        f"one run of {first['rounds']} rounds. Efficiency: images/s of a process against one process alone, of the "
        "medians / of the fastest steps; without DistributedDataParallel, what sharing the machine costs alone. "
        "Exchange: share of a step beyond the same step without exchange."
    )
    commands = dict.fromkeys(row["command"] for row in rows)
    return "\n".join(["", *lines, "", wrapped(note), "", "```bash", *commands, "```", ""])


def render_prediction(results: str | Path) -> str:
    """The Markdown of the rows of prediction.py: a line for every network and size, its batches and modes together."""
    lines = ["| training step on a CPU | batches | modes | measured peaks | largest error |", "|---|---|---|--:|--:|"]
    groups: dict[tuple, list[dict[str, str]]] = defaultdict(list)
    rows = rows_of(results, "prediction")
    for row in rows:
        groups[row["model"], row["depth"], row["image_size"], row["converted"]].append(row)
    for group in groups.values():
        first = group[0]
        what = title(first) + (" of torchvision, converted" if first["converted"] == "True" else "")
        sides = "x".join([first["image_size"]] * int(first["spatial_dims"]))
        batches = ", ".join(sorted({row["batch_size"] for row in group}, key=int))
        modes = ", ".join(KNOWN.get(mode, f"`{mode}`") for mode in dict.fromkeys(row["mode"] for row in group))
        peaks = sorted(float(row["measured_bytes"]) / 2**20 for row in group)
        error = max(abs(float(row["predicted_bytes"]) / float(row["measured_bytes"]) - 1) for row in group)
        cells = [f"{what}, {sides}", batches, modes, f"{peaks[0]:,.0f} to {peaks[-1]:,.0f} MiB", f"{100 * error:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    commands = dict.fromkeys(row["command"] for row in rows)
    return "\n".join(["", *lines, "", "```bash", *commands, "```", ""])


PARTS = {
    "benchmark": render, "conversion": render_conversion, "prediction": render_prediction, "counts": render_counts,
    "scaling": render_scaling,
}  # fmt: skip


def run(settings: Settings) -> None:
    readme, results = Path(settings.readme), Path(settings.results)
    figure = results / "memory.png"
    draw_memory(rows_of(results, "memory"), figure)
    text = readme.read_text(encoding="utf-8")
    for name in parts(text):
        before, _, after = split(text, name)
        begin, end = BEGIN.replace("benchmark", name), END.replace("benchmark", name)
        text = before + begin + PARTS[name](results, *figures(name, figure, readme)) + end + after
    temporary = f"{readme}.tmp"
    Path(temporary).write_text(text, encoding="utf-8")
    os.replace(temporary, readme)
    print(f"wrote {figure} and the parts of {readme} between markers")


def figures(name: str, figure: Path, readme: Path) -> tuple[str, ...]:
    """What a part needs besides the rows: the figure's address as the README writes it."""
    return (os.path.relpath(figure, readme.parent),) if name == "benchmark" else ()


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

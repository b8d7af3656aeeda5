#!/usr/bin/env python3
"""Plots a decode bench's JSON with the peers' figures: time over context, and share of the read ceiling.

    python3 -m venv target/plot && target/plot/bin/pip install matplotlib==3.11.2
    target/plot/bin/python scripts/plot.py decode.json benches/results/h200

writes benches/results/h200-context.svg, which README shows from docs/, and benches/results/h200-share.svg. Not part of CI.
"""

import json
import math
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

OURS = "wgpu-mla"
COLOURS = {
    OURS: "#1257b8",
    "llama.cpp Vulkan": "#e07b1a",
    "vLLM Triton": "#2f9e5b",
    "FlashMLA": "#8e4ec6",
    "floor": "#8a8a8a",
}
plt.rcParams.update({
    # Text is kept as text, so files are small and searchable. Without date and random ids, equal input gives equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "wgpu-mla",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
})


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    draw_context(run, f"{sys.argv[2]}-context.svg")
    draw_share(run, f"{sys.argv[2]}-share.svg")


def draw_context(run, path):
    """Batch 1 at each context, and the serving shape as it grows."""
    serving = [r for r in run["records"] if r.get("concurrency", 1) > 1]
    figure, axes = plt.subplots(1, 1 + bool(serving), figsize=(6 + 5 * bool(serving), 4.2), squeeze=False)
    single = axes[0][0]
    points = {}
    for record in decodes(run):
        same = record["heads"] == 16 and record["q_len"] == 1 and record["kv"] == "bf16"
        if same and record["query"] == "bf16" and record["shape"].startswith("b1x") and is_default(record):
            context = int(record["shape"].split("x")[1])
            for name, us in times(record).items():
                points.setdefault(name, []).append((context, us))
    for name, line in points.items():
        line.sort()
        style = "--" if name == "floor" else "-"
        single.plot(*zip(*line), style, marker="o", color=COLOURS[name], label=name)
    single.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="us")
    single.set_title("16 heads, bf16, one sequence", loc="left")
    ticks = sorted({context for line in points.values() for context, _ in line})
    if ticks:
        single.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        single.minorticks_off()
        single.set_yticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
        single.legend(fontsize=9)
    for record in serving:
        growth = axes[0][1]
        contexts, us = zip(*record["us_by_context"])
        growth.plot(contexts, us, color=COLOURS[OURS], label=OURS)
        floor = [c * record["concurrency"] * 1152 / run["read_ceiling_gb_s"] / 1e3 for c in contexts]
        growth.plot(contexts, floor, "--", color=COLOURS["floor"], label="this run's read ceiling")
        growth.set(xlabel="context, tokens", ylabel="us a layer", ylim=(0, None), xlim=(0, None))
        growth.set_title(f"16 heads, bf16, {record['concurrency']} sequences that grow", loc="left")
        growth.legend()
    finish(figure, run, path)


def draw_share(run, path):
    """KV bytes a second as a share of the read ceiling: ours of this run's device, the peers' of their device."""
    rows = [r for r in decodes(run) if is_default(r) and r.get("peers_us")]
    names = [name for name in COLOURS if name != "floor"]
    figure, axis = plt.subplots(figsize=(8, 0.75 * max(len(rows), 1) + 1.2))
    height = 0.8 / len(names)
    labelled = set()
    for at, record in enumerate(rows):
        kv_bytes = record["gb_s"] * record["us"] * 1e3
        for turn, name in enumerate(names):
            us = times(record).get(name)
            if us is None:
                continue
            ceiling = run["read_ceiling_gb_s"] if name == OURS else run["peers_read_ceiling_gb_s"]
            share = 100 * kv_bytes / us / 1e3 / ceiling
            y = at + (turn - (len(names) - 1) / 2) * height
            axis.barh(y, share, height, color=COLOURS[name], label=None if name in labelled else name)
            labelled.add(name)
            axis.text(share + 0.5, y, f"{share:.0f} %, {us:.0f} us", va="center", fontsize=7, color="#444444")
    axis.set_yticks(range(len(rows)), [short(record["workload"]) for record in rows])
    axis.set(xlim=(0, 112), ylim=(max(len(rows), 1) - 0.4, -0.6), xlabel="KV bytes a second, % of the read ceiling")
    axis.grid(axis="y", visible=False)
    if rows:
        figure.legend(loc="upper center", ncols=len(names))
    finish(figure, run, path)


def decodes(run):
    return [r for r in run["records"] if "shape" in r]


def is_default(record):
    return record["dims"] == [512, 64] and not record["workload"].endswith("plain")


def times(record):
    """Microseconds by name, ours first."""
    peers = {name: us for name, us in record.get("peers_us") or [] if us is not None and math.isfinite(us)}
    return {OURS: record["us"], **peers}


def short(workload):
    return workload.replace(" kv ", " ").replace(" q bf16", "").replace(" q f16", "")


def finish(figure, run, path):
    device = run["device"]
    other = "" if run["peers_device"] in device["name"] else f". Peers: {run['peers_device']}"
    text = f"{device['name']}, {device.get('driver_info', '')}, {device.get('api', '')}, {run['date'][:10]}{other}"
    figure.text(0.995, 0.002, text, ha="right", va="bottom", fontsize=7, color="#666666")
    height = figure.get_figheight()
    figure.tight_layout(rect=(0, 0.15 / height, 1, 1 - (0.3 / height if figure.legends else 0)))
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

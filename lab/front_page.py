"""The quick-start's pictures and figures, all from one run of the present commit: `make pictures`.

It trains `gspo train quickstart` from scratch in a scratch folder, draws PICTURES from that run, writes RESULT and
rewrites the figures that the pages quote (PLACES). tests/docs/test_quickstart_figures.py compares pages, pictures and
RESULT. Seconds are those of this machine while the script runs, so run it on an idle machine.

    .venv/bin/python lab/front_page.py              # needs chromium and the extras `report` and `test`
    .venv/bin/python lab/front_page.py --install    # also measure `make setup-train` in a fresh clone (network)
    .venv/bin/python lab/front_page.py --threads 1  # a trial on a busy machine, where two threads wait for each other
    .venv/bin/python lab/front_page.py --pages      # only rewrite the figures in the pages from RESULT
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "lab" / "results" / "front_page.json"
REPORT, SAMPLES = "docs/img/report.png", "docs/img/report_samples.png"
PANELS, CURVES = "docs/img/quickstart.png", "docs/img/gallery/quickstart.png"
PICTURES = (REPORT, SAMPLES, PANELS, CURVES)
COMMAND = ("gspo", "train", "quickstart")
BUILD = """
import time
from gspo.models import embedded
start = time.perf_counter()
embedded.build("embedded:tiny")
print(time.perf_counter() - start)
"""
STEPS = (0, 1, 5, 60)  # whose lines docs/quickstart.md shows

Result = Mapping[str, Any]


# -- The places of the pages


class Place(NamedTuple):
    """Figures in a page: each `{}` of the sentence is one, with its text as a function of the result."""

    page: str
    sentence: str  # any white space in the page stands for a space
    texts: Sequence[Callable[[Result], str]]


def before(result: Result) -> str:
    return f"{100 * result['run']['accuracy_before'][0]:.1f}"


def after(result: Result) -> str:
    return f"{100 * result['run']['accuracy_after'][0]:.1f}"


def interval(result: Result) -> str:
    _, low, high = result["run"]["accuracy_after"]
    return f"{100 * low:.1f}–{100 * high:.1f}"


def problems(result: Result) -> str:
    return str(result["run"]["problems"])


def steps(result: Result) -> str:
    return str(result["run"]["steps"])


def train_s(result: Result) -> str:
    return f"{result['run']['train_s']:.0f}"


def build_s(result: Result) -> str:
    return f"{result['run']['build_s']:.0f}"


def install_s(result: Result) -> str:
    return f"{result['install']['seconds']:.0f}"


def cores(result: Result) -> str:
    number = result["made"]["cores"]
    return f"{number} core{'s' * (number > 1)}"


def processor(result: Result) -> str:
    """The processor, with the widest instructions that float32 products use."""
    wide = "AVX-512" if "AVX-512" in result["made"]["instructions"] else result["made"]["instructions"][0]
    return f"{result['made']['processor']}, {wide}"


def step_lines(result: Result) -> str:
    """The title and the lines of some steps, cut after the figure `sample tok/s` (step 1) or `length`."""
    lines = result["run"]["lines"]
    out = [lines["title"]]
    for step in STEPS:
        line = lines[str(step)]
        last = "sample tok/s" if step == 1 else "length"
        # Two spaces separate the figures. Step 0 has neither of the two.
        cut = re.match(rf".*?  {last} \S+(?=  )", line)
        out.append(f"{cut[0]}  …" if cut else line)
    return "\n".join(out)


def summary_lines(result: Result) -> str:
    return "\n".join(f"{name:<17}  {text}" for name, text in result["run"]["summary"].items())


README, INDEX, QUICKSTART, GALLERY = "README.md", "docs/index.md", "docs/quickstart.md", "docs/gallery.md"
PLACES = (
    Place(
        README,
        "went from {} % to {} % of {} held-out sums in {} steps and {} s of training on {} ({}).",
        (before, after, problems, steps, train_s, cores, processor),
    ),
    Place(README, "installation took {} s", (install_s,)),
    Place(README, "building the model {} s", (build_s,)),
    Place(INDEX, "training takes {} s on {} gspo train", (train_s, cores)),
    Place(QUICKSTART, "cached in `~/.cache/gspo`; {} s on {}).", (build_s, cores)),
    Place(QUICKSTART, "Each of the {} steps", (steps,)),
    Place(QUICKSTART, "The steps took {} s on {} ({}).", (train_s, cores, processor)),
    Place(QUICKSTART, "one line per step: ``` {}\n```", (step_lines,)),
    Place(QUICKSTART, "greedy accuracy on {} problems", (problems,)),
    Place(QUICKSTART, "with the place of every result: ``` {}\nrun runs/quickstart/gspo", (summary_lines,)),
    Place(
        GALLERY,
        "| column addition | {} → {} % held out | {} s, {} |",
        (before, after, train_s, cores),
    ),
    Place(
        GALLERY,
        "learns to add correctly. **Expect** {} % → {} % ({}) of {} held-out sums in {} steps.",
        (before, after, interval, problems, steps),
    ),
)


def read_result() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def figures_of(place: Place, page: str) -> re.Match[str]:
    """The sentence in the text of its page, a group for each figure."""
    parts = (
        "".join(r"\s+" if part == " " else re.escape(part) for part in re.split("( )", each))
        for each in place.sentence.split("{}")
    )
    found = list(re.finditer("(.+?)".join(parts), page, re.DOTALL))
    if len(found) != 1:
        raise SystemExit(f"{place.page} has {len(found)} times, not once: {place.sentence} (lab/front_page.py, PLACES)")
    return found[0]


def differences(name: str, page: str, result: Result) -> list[str]:
    """What a page has in place of the figures of the result."""
    found = []
    for place in PLACES:
        if place.page == name:
            pairs = zip(figures_of(place, page).groups(), place.texts, strict=True)
            found += [f"{name} has {got!r}, the result {text(result)!r}" for got, text in pairs if got != text(result)]
    return found


def rewritten(name: str, page: str, result: Result) -> str:
    """The page with the figures of the result."""
    for place in PLACES:
        if place.page == name:
            match = figures_of(place, page)
            for group in range(len(place.texts), 0, -1):  # from the last one, so that earlier positions stay
                start, end = match.span(group)
                page = page[:start] + place.texts[group - 1](result) + page[end:]
    return page


def rewrite_pages(result: Result) -> None:
    for name in dict.fromkeys(place.page for place in PLACES):
        file = ROOT / name
        file.write_text(rewritten(name, file.read_text(encoding="utf-8"), result), encoding="utf-8")
        print(f"written: {name}")


# -- The run


def machine() -> dict[str, Any]:
    """The processor, its vector instructions from narrow to wide, and the cores that a run may use."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)$", info, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
    return {
        "processor": " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b", " ", name[1] if name else "").split()),
        "instructions": [text for flag, text in known.items() if flag in has] or ["no AVX2"],
        "cores": len(os.sched_getaffinity(0)),
    }


def environment(scratch: Path, threads: int | None) -> dict[str, str]:
    """A user's: all cores (or `threads`), an empty cache of models, this clone's source."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "GSPO_", "COLUMNS"))}
    ours |= {"GSPO_CACHE": str(scratch / "cache"), "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    return ours | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def timed(command: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[float, str]:
    """Seconds and output of a command; its errors are shown as they come."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}")
    return time.perf_counter() - start, done.stdout


def train(scratch: Path, threads: int | None) -> tuple[Path, dict[str, Any]]:
    """Build the model, train the quick-start; the run directory and what is quoted of it."""
    from gspo import Run
    from gspo.report import summary_rows

    env = environment(scratch, threads)
    _, built = timed([sys.executable, "-c", BUILD], scratch, env)
    command_s, output = timed([sys.executable, "-m", *COMMAND], scratch, env)
    run = Run(scratch / "runs" / "quickstart" / "gspo")
    s = run.summary
    printed = output.splitlines()
    lines = {"title": next(line for line in printed if line.startswith("GSPO ("))}
    for step in STEPS:
        lines[str(step)] = next(line for line in printed if re.match(rf"step +{step}/", line))
    rows = dict(summary_rows(s))
    return Path(run.path), {
        "steps": s.steps,
        "problems": s.problems,
        "accuracy_before": s.score,
        "accuracy_after": s.score_end,
        "build_s": round(float(built.split()[-1]), 1),
        "train_s": round(s.seconds, 1),
        "command_s": round(command_s, 1),
        "lines": lines,
        "summary": {name: rows[name] for name in ("held-out accuracy", "reward", "clipped")},
    }


def install() -> dict[str, Any]:
    """Seconds of `make setup-train` in a fresh clone, without pip's cache."""
    made = stamp()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        took, _ = timed(["make", "setup-train"], Path(folder), {**env, "PIP_NO_CACHE_DIR": "1"})
    return {"seconds": round(took, 1), "command": "make setup-train, without pip's cache", **made}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def stamp() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git("rev-parse", "HEAD"),
        "load_before": round(os.getloadavg()[0], 2),  # of one minute, before the measurement
        **machine(),
    }


# -- The pictures


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Debian's chromium, as tests/report/test_browser.py starts it."""
    from playwright import sync_api

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no chromium on this machine: apt-get install chromium fonts-dejavu-core")
    with sync_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def draw(run: Path) -> None:
    """The four pictures of a run."""
    from gspo import Run

    shutil.copyfile(run / "training.png", ROOT / PANELS)
    curves = Run(run).plot("reward/mean", "eval/accuracy", "policy/entropy")
    curves.savefig(ROOT / CURVES, dpi=70)
    with browser() as chromium:

        def visit(width: int, height: int, scheme: str) -> Any:
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto((run / "report.html").as_uri())
            page.locator("#curve-charts .chart").first.wait_for()
            return page

        shoot(visit(1265, 1000, "light"), ROOT / REPORT)
        page = visit(1380, 790, "dark")
        page.get_by_role("button", name="With tokens", exact=True).click()
        page.locator("[data-column=log_s]").click()
        page.locator("[data-column=log_s]").click()  # ascending: the sequences that moved farthest down come first
        page.locator("#spacer .row.item").first.click()
        page.locator("[data-colour=ratio]").click()
        page.locator("#nav a[href='#samples']").click()
        shoot(page, ROOT / SAMPLES)


def shoot(page: Any, to: Path) -> None:
    """What the window shows, in 256 colours: a third of the bytes."""
    from PIL import Image

    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # fonts, and the end of scrolling
    page.screenshot(path=to)
    with Image.open(to) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(to, optimize=True)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="also measure the installation in a fresh clone")
    parser.add_argument("--threads", type=int, help="instead of all cores")
    parser.add_argument("--pages", action="store_true", help="only rewrite the figures in the pages")
    asked = parser.parse_args(words)
    if asked.pages:
        rewrite_pages(read_result())
        return 0
    if changed := git("status", "--porcelain", "--", "src", "examples"):
        raise SystemExit(f"the result names the commit that ran, so commit these first:\n{changed}")
    sys.path.insert(0, str(ROOT / "src"))
    earlier = read_result() if RESULT.exists() else {}
    made = stamp()
    if made["load_before"] > 0.5:
        print(f"the machine is busy (load {made['load_before']}): the seconds are not those of an idle one", flush=True)
    installed = install() if asked.install or not earlier else earlier["install"]
    with tempfile.TemporaryDirectory() as scratch:
        run, figures = train(Path(scratch), asked.threads)
        draw(run)
    result = {
        "made": {"command": " ".join(COMMAND), **made, "cores": min(asked.threads or made["cores"], made["cores"])},
        "run": figures,
        "install": installed,
        "pictures": {name: sha256(ROOT / name) for name in PICTURES},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {RESULT.relative_to(ROOT)}, {', '.join(PICTURES)}")
    rewrite_pages(read_result())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Renders the page of a run: jinja2 with autoescape, style and script inside, nothing from the network."""

import base64
import hashlib
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mkd.report.html import charts
from mkd.report.html.content import Content, content_of, visible
from mkd.report.html.environment import environment_of
from mkd.report.html.run_folder import RunFolder
from mkd.utils.atomic_files import regular_target, write_bytes

PARTS = Path(__file__).parent
"""Folder of page.html.jinja, page.css and page.js."""


def render(content: Content) -> str:
    """The page as HTML.

    All text of the run goes through jinja2's escaping. A content security policy allows no other script than the page's
    own, and no request.
    """
    environment = Environment(
        loader=FileSystemLoader(PARTS),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (PARTS / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = {name.lower(): getattr(charts, name) for name in ("WIDTH", "HEIGHT", "LEFT", "RIGHT", "TOP", "BOTTOM")}
    return environment.get_template("page.html.jinja").render(
        run=content,
        data=[_data(panel) for panel in (*content.panels, *content.other_panels)],
        frame=frame,
        style=Markup((PARTS / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
    )


def _data(panel: charts.Panel) -> dict[str, object]:
    """The values of a panel for the page's script."""
    values = [{**curve, "label": visible(curve["label"])} for curve in panel.values]
    return {"bounds": panel.bounds, "percent": panel.percent, "values": values}


def write_report(folder: Path, out: Path, metrics: Path | None = None) -> RunFolder:
    """Write the page of a run.

    Args:
        folder: its --save folder.
        out: the file to write, which is replaced atomically.
        metrics: its --kd-metrics-file, if that is not in the folder.

    Returns:
        The records that were read.

    Raises:
        MkdConfigError: `out` is not a regular file.
        MkdDataError: the folder is not a run.
    """
    target = regular_target(out, "--out")
    run = RunFolder.read(folder, metrics)
    html = render(content_of(run, environment_of(run.run_yaml), datetime.now().astimezone()))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, html.encode("utf-8", errors="replace"))
    return run

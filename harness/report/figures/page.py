"""A figure as a part of a web page: SVG whose text is text, and whose colours are the page's own."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from overlap_bench.harness.report.figures import style

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Colours of the figures, and the custom properties a page sets for them, light and dark.
PROPERTIES = {
    "#ffffff": "--paper",
    style.INK: "--ink",
    style.MUTED: "--muted",
    style.GRID: "--grid",
    style.BAND: "--band",
    style.ARMS["before"].colour: "--before",
    style.ARMS["after"].colour: "--after",
}
FONT = re.compile(r"font-family: [^;]*")
COLOUR = re.compile("|".join(PROPERTIES))


def inline_svg(figure: Figure, name: str) -> str:
    """The <svg> of a figure, which is for nothing else afterwards: as wide as there is room, at most its own
    width. `name` is spoken for the figure, and keeps its ids apart from those of others on the page."""
    figure.set_facecolor("none")
    for axes in figure.axes:
        axes.set_facecolor("none")
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "text.usetex": False}):
        # By savefig it would be drawn twice: once for its layout, which this does while it draws.
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        if element.tag == f"{{{SVG}}}g":
            element.attrib.pop("id", None)
        if "fill" in element.attrib:  # what lies under a hatch; custom properties belong into a style
            element.set("style", f"fill: {element.attrib.pop('fill')}; {element.get('style', '')}")
        if "style" in element.attrib:
            coloured = COLOUR.sub(lambda found: f"var({PROPERTIES[found[0]]})", element.attrib["style"])
            element.set("style", FONT.sub("font-family: inherit", coloured))
    width = root.attrib.pop("width")
    root.attrib.pop("height")
    root.attrib |= {"role": "img", "aria-label": name, "style": f"width: 100%; max-width: {width}"}
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")

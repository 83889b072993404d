"""Pictures of plans: the simulated schedule keeps its law, every node and item is drawn, equal plans give equal files."""

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import cascade_fd as cf
from cascade_fd import Level, PrefixTree
from cascade_fd.hardware import H200
from cascade_fd.planning.draw import COLOURS, schedule
from cascade_fd.planning.facts import facts_of
from tests.reference.test_explain import MODEL, plan_of


@pytest.mark.parametrize(("durations", "slots"), [([5] * 7, 3), ([9, 1, 1, 1, 4, 4, 2], 2), ([3], 4), ([1, 2, 3, 4], 1)])
def test_schedule_deals_out_in_order_to_the_first_free_slot(durations, slots):
    boxes = schedule(durations, slots)
    assert (boxes[:, 1] - boxes[:, 0]).tolist() == durations
    assert (np.diff(boxes[:, 0]) >= 0).all()
    for slot in range(slots):
        mine = boxes[boxes[:, 2] == slot]
        assert (mine[1:, 0] == mine[:-1, 1]).all()  # never two at once, never idle before the last
    makespan, even = boxes[:, 1].max(), sum(durations) / slots
    assert max(even, max(durations)) <= makespan <= even + max(durations)


def test_png_shows_every_launch(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    made = plan_of("groups of 1, 5 and 58")
    made.draw(tmp_path / "plan.png", H200)
    pixels = (image.imread(tmp_path / "plan.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    facts = facts_of(made)
    of_shared = set(facts.launch[facts.shared].tolist())
    assert of_shared
    for launch in of_shared:  # private nodes have lighter colours
        want = [int(COLOURS[launch][i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == want).all(1).mean() > 0.01
    made.draw(tmp_path / "again.png", H200)
    assert (tmp_path / "plan.png").read_bytes() == (tmp_path / "again.png").read_bytes()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("share", ["always", "never"])
def test_svg_has_a_shape_per_node_and_item(tmp_path, device, share):
    pytest.importorskip("matplotlib")
    made = plan_of("nested", device=device, share=share)
    made.draw(str(tmp_path / "plan.svg"), H200)
    collections = [g for g in ET.parse(tmp_path / "plan.svg").iter() if "PolyCollection" in g.get("id", "")]
    shapes = [sum(e.tag.endswith(("path", "use")) for e in g.iter()) for g in collections]
    assert shapes[0] == {"always": len(made.tree.nodes), "never": made.tree.num_requests}[share]
    assert len(shapes) == 2 and shapes[1] >= made.num_items
    made.draw(tmp_path / "again.svg", H200)
    assert (tmp_path / "plan.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_pictures_of_nothing_and_of_pdf(tmp_path):
    pytest.importorskip("matplotlib")
    cf.plan(PrefixTree.from_levels([Level([0], [])]), **MODEL).draw(tmp_path / "empty.pdf")
    assert (tmp_path / "empty.pdf").read_bytes().startswith(b"%PDF")


def test_pictures_that_cannot_be_drawn(tmp_path, monkeypatch):
    made = plan_of("no sharing")
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .png, .svg, .pdf, got 'plan.gif'"):
        made.draw(tmp_path / "plan.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'draw: needs matplotlib; pip install "cascade_fd\[bench\]"'):
        made.draw(tmp_path / "plan.png")

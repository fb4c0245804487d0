"""The page in a real browser: opened, clicked, searched, used by keys alone, large, empty and broken."""

import json

import pytest

from kiln.observe.report import page as text_of
from tests.page.sample import FILE, SOURCE, data

SECTIONS = ("overview", "source", "graphs", "timeline", "guards", "recompiles", "memory")


def test_every_section_opens_without_an_error_or_a_request(opened):
    seen = opened(data())
    for name in SECTIONS:
        seen.section(name)
        assert seen.locator("#main > *").count() == 1
        assert seen.locator(f"#tab-{name}").get_attribute("aria-selected") == "true"
        assert "cannot be shown" not in seen.locator("#main").inner_text()
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in seen.requests if url.startswith("file:")]) == 1


def test_source_is_tinted_and_breaks_stand_in_place(opened):
    main = opened(data()).section("source")
    assert [row.inner_text() for row in main.locator(".row .text").all()] == [line or " " for line in SOURCE]
    tinted = main.locator(".row.t0, .row.t1").all()
    assert [int(row.get_attribute("data-line")) for row in tinted] == [14, 15, 16, 17, 20]
    assert main.locator(".row.stop").get_attribute("data-line") == "18"
    after = main.locator(".row.stop + .broken")
    assert "branch-on-tensor" in after.inner_text() and "use torch.where" in after.inner_text()
    assert after.locator(".caret").inner_text().strip() == "^" * 11


def test_text_of_the_program_is_never_markup(opened):
    evil = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>\u2028<!--"
    given = data(title=evil)
    given["files"][0]["lines"] = [evil] * 20
    given["graphs"][0]["title"] = evil
    given["graphs"][0]["guards"] = [{"text": evil, "place": None}]
    for node in given["graphs"][0]["views"][0]["nodes"]:
        node["n"] = node["o"] = evil
    given["breaks"][0]["reason"] = evil
    given["fallbacks"] = [{"region": evil, "error": evil, "file": ""}]
    seen = opened(given)
    for name in SECTIONS:
        seen.section(name)
    seen.fill("#search", "onerror")
    seen.wait_for_selector(".hit")
    assert seen.evaluate("window.taken") is None
    assert seen.title() == evil.replace("\u2028", " ") or seen.title().startswith("</script>")
    assert seen.locator("img").count() == 0
    assert seen.errors == []


def test_a_click_on_a_node_shows_its_line_kernel_and_code(opened):
    seen = opened(data(40))
    side = seen.section("graphs").locator(".side")
    seen.click_item("rsqrt")
    text = side.inner_text()
    assert seen.chosen() == "rsqrt"
    assert "h = self.norm(x)" in text and "model.py:14" in text
    assert "float32[8, 128, 512]" in text and "layers.0.norm" in text
    assert side.locator("pre[aria-label=Loops]").inner_text().startswith("kernel k0")
    assert "define void" in side.locator("pre[aria-label=LLVM]").inner_text()
    side.locator("button", has_text="mul_").first.click()
    assert seen.chosen() == "mul"
    side.locator("button", has_text="model.py:14").click()
    assert seen.locator(".row.here").get_attribute("data-line") == "14"
    assert seen.errors == []


def test_modules_open_and_close(opened):
    seen = opened(data(40))
    seen.section("graphs")
    whole = seen.items()
    seen.click("text=Collapse")
    assert seen.items() == ["x", "layers.0", "layers.1", "output"][: len(seen.items())]
    seen.click("text=Expand")
    assert seen.items() == whole
    seen.click_item("norm")
    seen.keyboard.press("Enter")
    assert "norm" in seen.items() and "rsqrt" in seen.items()  # that of the second layer is still open
    assert len(seen.items()) == len(whole) - 3


def test_zoom_and_pan(opened):
    seen = opened(data(40))
    seen.section("graphs")
    state = "[STATE.drawing.scale, STATE.drawing.x, STATE.drawing.y]"
    scale, x, y = seen.evaluate(state)
    seen.mouse.move(300, 400)
    seen.mouse.wheel(0, -300)
    seen.wait_for_function(f"() => STATE.drawing.scale > {scale}")
    scale, x, y = seen.evaluate(state)
    seen.mouse.down()
    seen.mouse.move(360, 440, steps=4)
    seen.mouse.up()
    assert seen.evaluate(state) == pytest.approx([scale, x - 60 / scale, y - 40 / scale])
    assert seen.chosen() is None  # a drag selects nothing
    seen.click("text=Fit")
    assert seen.evaluate("STATE.drawing.layout.height * STATE.drawing.scale <= STATE.drawing.box().height")


def test_the_graph_is_used_by_keys_alone(opened):
    seen = opened(data(40))
    seen.keyboard.press("Tab")
    assert seen.evaluate("document.activeElement.className") == "skip"
    names = []
    for _ in range(3):
        seen.keyboard.press("Tab")
        names.append(seen.evaluate("document.activeElement.id"))
    assert names == ["search", "theme", "tab-overview"]
    seen.keyboard.press("ArrowRight")
    seen.keyboard.press("ArrowRight")
    assert seen.evaluate("document.activeElement.id") == "tab-graphs"
    while seen.evaluate("document.activeElement.tagName") != "CANVAS":
        seen.keyboard.press("Tab")
    outline = seen.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    seen.keyboard.press("ArrowDown")
    assert seen.chosen() == "x"
    seen.keyboard.press("ArrowDown")
    assert seen.chosen() in ("mean", "sub")
    assert "kernel k0" in seen.locator("#said").inner_text()
    seen.keyboard.press("ArrowUp")
    assert seen.chosen() == "x"
    seen.keyboard.press("ArrowDown")
    seen.keyboard.press("Enter")
    assert seen.evaluate("document.activeElement.className") == "side"
    seen.keyboard.press("Escape")
    assert seen.evaluate("document.activeElement.tagName") == "CANVAS"
    seen.keyboard.press("Escape")
    assert seen.chosen() is None
    before = seen.evaluate("STATE.drawing.scale")
    seen.keyboard.press("+")
    assert seen.evaluate("STATE.drawing.scale") > before
    assert seen.errors == []


def test_search_finds_everything_and_goes_there(opened):
    seen = opened(data())
    seen.section("graphs")
    seen.keyboard.press("/")
    assert seen.evaluate("document.activeElement.id") == "search"
    seen.keyboard.type("softmax")
    seen.wait_for_selector(".hit[aria-selected=true]")
    assert "Source (1)" in seen.locator("#found").inner_text()
    seen.keyboard.press("Enter")
    assert seen.locator(".row.here").get_attribute("data-line") == "16"
    for words, group in (("branch tensor", "Breaks"), ("training", "Guards"), ("k3", "Kernels"), ("x.shape", "Recompiles"), ("rsqrt", "Nodes"), ("layers.1.attn", "Modules")):
        seen.fill("#search", words)
        seen.wait_for_function(f"() => document.querySelector('#found').innerText.includes('{group} (')")
    seen.fill("#search", "rsqrt")
    seen.wait_for_function("() => document.querySelector('#found').innerText.startsWith('Nodes')")
    seen.keyboard.press("ArrowDown")
    seen.keyboard.press("Enter")
    assert seen.chosen() == "rsqrt"
    assert seen.evaluate("document.activeElement.tagName") == "CANVAS"
    assert seen.evaluate("[...STATE.drawing.matches].every((i) => STATE.graph.view.nodes[i].o === 'rsqrt')")
    seen.fill("#search", "no such thing")
    seen.wait_for_selector("#found .none")
    seen.focus("#search")
    seen.keyboard.press("Escape")
    assert seen.locator("#found").is_hidden() and seen.input_value("#search") == ""
    assert seen.errors == []


def test_light_and_dark(opened):
    seen = opened(data(), scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = seen.evaluate(ground)
    assert seen.locator("html").get_attribute("data-theme") == "dark"
    seen.section("graphs")
    seen.click("#theme")
    assert seen.locator("html").get_attribute("data-theme") == "light" and seen.evaluate(ground) != dark
    assert opened(data()).locator("html").get_attribute("data-theme") == "light"


CONTRAST = """() => {
  const read = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((part) => part / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    probe.remove();
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(read(a), read(b)) + 0.05) / (Math.min(read(a), read(b)) + 0.05);
  return ["ink", "soft", "faint", "accent", "bad", "key", "str", "num", "rem"].flatMap((ink) => ["paper", "panel"].map((ground) => [ink, ground, ratio(ink, ground)]));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(opened, scheme):
    assert [row for row in opened(data(), scheme=scheme).evaluate(CONTRAST) if row[2] < 4.5] == []


@pytest.mark.parametrize("size", [(1280, 800), (420, 800)])
def test_nothing_is_cut_off_and_everything_has_a_name(opened, size):
    seen = opened(data(), size=size)
    for name in SECTIONS:
        seen.section(name)
        assert seen.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert seen.evaluate("document.querySelector('#main').scrollWidth <= innerWidth"), name
        unnamed = seen.evaluate("[...document.querySelectorAll('button, input, select, canvas')].filter((one) => !(one.getAttribute('aria-label') || one.innerText || '').trim()).length")
        assert unnamed == 0, name


def test_guards_recompiles_times_and_memory(opened):
    seen = opened(data())
    main = seen.section("guards")
    assert main.locator("td.wide").all_inner_texts()[1] == "self.training is False"
    main.locator("input").fill("sizes")
    assert main.locator("td.wide").all_inner_texts() == ["x is a float32 tensor of sizes [8, 128, 512] on cpu"]
    main = seen.section("recompiles")
    assert [(one.locator(".old").inner_text(), one.locator(".new").inner_text()) for one in main.locator(".history li").all()] == [("8", "16"), ("8", "24")]
    assert "kiln.mark_dynamic(x, 0)" in main.inner_text()
    main = seen.section("timeline")
    assert main.locator(".lane .who").all_inner_texts()[0] == "Block.forward 0"
    assert main.locator(".span").first.get_attribute("aria-label") == "capture: 120 ms"
    main.locator(".span", has_text="k1").first.click()
    assert "Kernel of" in seen.locator(".side").inner_text()
    main = seen.section("memory")
    assert main.locator("svg rect.value").count() > 10 and "10 MiB" in main.inner_text()
    assert seen.errors == []


def test_a_line_leads_to_its_ops(opened):
    seen = opened(data(40))
    row = seen.section("source").locator(".row[data-line='16']")
    row.hover()
    row.locator("button").click()
    assert seen.locator("#tab-graphs").get_attribute("aria-selected") == "true"
    assert "model.py:16" in seen.locator(".side").inner_text()


@pytest.mark.parametrize("count", [60, 2000])
def test_layout(opened, count):
    """Nothing lies upon anything else, modules hold what is theirs, and edges go down."""
    seen = opened(data(count))
    seen.section("graphs")
    seen.evaluate("STATE.drawing.openAll(true)")
    shown = seen.evaluate("STATE.drawing.layout.items.length")
    assert shown >= count * 0.7
    overlapping = """() => {
      const items = [...STATE.drawing.layout.items].sort((a, b) => a.y - b.y);
      let found = 0;
      items.forEach((a, i) => { for (let j = i + 1; j < items.length && items[j].y < a.y + a.h; j++) {
        const b = items[j];
        if (a.x < b.x + b.w && b.x < a.x + a.w) found++;
      } });
      return found;
    }"""
    assert seen.evaluate(overlapping) == 0
    outside = "STATE.drawing.layout.items.filter((item) => item.parent.parent && (item.x < item.parent.x || item.y < item.parent.y || item.x + item.w > item.parent.x + item.parent.w || item.y + item.h > item.parent.y + item.parent.h)).length"
    assert seen.evaluate(outside) == 0
    assert seen.evaluate("STATE.drawing.layout.edges.filter((edge) => edge.to.y < edge.from.y + edge.from.h).length") == 0


def test_a_graph_of_two_thousand_nodes_loads_in_two_seconds(opened, capsys):
    text = text_of(data(2000))
    took = []
    for _ in range(3):
        seen = opened(text)
        ready = seen.evaluate("performance.now()")
        drawn = seen.evaluate("() => { const began = performance.now(); open('graphs'); paint(STATE.drawing); return performance.now() - began; }")
        took.append(ready + drawn)
    with capsys.disabled():
        print(f"\n2,000 nodes: {len(text) / 1e6:.1f} MB, loaded and drawn in {min(took):.0f} ms")
    assert min(took) < 2000


def test_an_empty_record_says_so(opened):
    seen = opened({"title": "quiet.py", "about": "", "graphs": [], "breaks": []})
    assert "Nothing was captured" in seen.locator("#main").inner_text()
    for name in SECTIONS:
        assert seen.section(name).inner_text().strip()
    assert seen.errors == []


BROKEN = {
    "no JSON": lambda text: text.replace('id="data">{', 'id="data">{"title": nonsense'),
    "cut off": lambda text: text.replace(text[text.index('id="data">') + 200 : text.index("</script>", text.index('id="data">'))], ""),
    "another kind": lambda text: text.replace(text[text.index('id="data">') + 10 : text.index("</script>", text.index('id="data">'))], "[1, 2]"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_record_that_cannot_be_read_says_so(opened, how):
    seen = opened(BROKEN[how](text_of(data(20))))
    assert "cannot be read" in seen.locator("[role=alert]").inner_text()
    for name in SECTIONS:
        seen.section(name)
    assert seen.errors == []


def test_numbers_that_are_none_and_strange_objects_do_no_harm(opened):
    given = data(20, fallbacks=[{"region": "f", "error": object(), "file": ""}])
    given["summary"][0]["value"] = float("nan")
    given["timeline"]["call"]["lanes"][0]["spans"][0]["seconds"] = float("inf")
    seen = opened(given)
    for name in SECTIONS:
        assert seen.section(name).inner_text().strip()
    assert "object object" in seen.section("overview").inner_text() and seen.errors == []


def test_what_is_not_drawn_can_be_found(opened):
    seen = opened(data(40))
    seen.fill("#search", "weight_")
    seen.wait_for_selector(".hit[aria-selected=true]")
    seen.keyboard.press("Enter")
    assert "Tensor that the program holds" in seen.locator(".side").inner_text()
    seen.click("text=Parameters")
    assert any(label.startswith("weight_") for label in seen.items()) and seen.errors == []


def test_a_damaged_part_leaves_the_others(opened):
    given = json.loads(json.dumps(data(20)))
    given["graphs"][0]["views"][0]["nodes"] = 7
    given["problems"] = ["The stages cannot be shown: the record is damaged."]
    seen = opened(given)
    assert "The stages cannot be shown" in seen.locator("[role=alert]").inner_text()
    assert "cannot be shown" in seen.section("graphs").inner_text()
    assert "branch-on-tensor" in seen.section("source").inner_text()
    assert FILE in seen.locator("#main").inner_text()
    assert seen.errors == []

"""The web page in a real Chromium, in states that a test describes: no deployment runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from web_kit import ScriptedPage, chromium, needs_chromium

from dynamo.protocols.status import RequestRecord

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ScriptedPage]:
    site = ScriptedPage(tmp_path)
    yield site
    site.close()


def test_a_cold_start_has_a_stage_of_its_own(site: ScriptedPage, browser: Browser) -> None:
    record = RequestRecord(
        request_id="cold",
        model="tiny",
        endpoint="chat_completions",
        received_at_s=1e9,
        duration_s=43.0,
        outcome="ok",
        worker="7",
        worker_wait_s=42.0,
        prepare_s=0.1,
        queue_s=0.1,
        prefill_s=0.3,
        decode_s=0.4,
    )
    warm = RequestRecord(
        request_id="warm", model="tiny", endpoint="x", received_at_s=1e9, duration_s=1.0, outcome=""
    )
    site.records["cold"] = record
    site.show(requests=(record, warm))
    page = site.open(browser, "requests")
    page.click("button:text('cold')")
    page.wait_for_selector(".legend >> text=waiting for a worker 42.0 s")
    box = page.locator(".timeline .waiting-for-a-worker").bounding_box()
    assert box is not None and box["width"] > 900
    page.click("button:text('warm')")
    page.wait_for_selector(".legend >> nth=1")
    assert "waiting" not in page.locator(".legend").nth(1).inner_text()
    page.context.close()

"""Make the pictures of docs/web.md: each section of the page over a deployment under load.

    python benchmarks/web_pictures.py [--out docs] [--seconds 30]

The deployment is that of ``web_page.py``: mock engines, six simulated GPUs, a model that sleeps and
one without a worker. Charts have as many seconds as the load runs before.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from playwright.async_api import Browser, Page
from web_page import HERE, WAIT_MS, Box, Load, chromium, running

WIDE = 1280
NARROW = 400
QUESTION = "Explain how a router chooses among workers that cache parts of a prompt."


async def open_section(
    browser: Browser, box: Box, tab: str, width: int = WIDE, scheme: str = "light"
) -> Page:
    """Open a section in colors and a width of its own."""
    dark = scheme == "dark"
    context = await browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme="dark" if dark else "light"
    )
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    await page.goto(f"{box.url}/ui#{tab}")
    await page.wait_for_selector("#live.ready")
    await page.wait_for_selector("#models .badge.ready", state="attached")
    return page


async def picture(page: Page, path: Path, full: bool = False) -> None:
    """Write a picture of a page; ``full`` has what is below the window, too."""
    await page.screenshot(path=path, full_page=full)
    print(path.name)


async def prepare(page: Page, tab: str) -> None:
    """Bring a section into the state that its picture shows."""
    if tab == "requests":
        await page.wait_for_selector("#request-rows td.id button")
        if await page.locator("#requests button:text-is('Pause')").count():
            await page.click("#requests button:text-is('Pause')")
        await page.locator("#request-rows td.id button").nth(2).click()
        await page.wait_for_selector("#request-rows .candidates .chosen")
    elif tab == "chat":
        await page.click("#chat-settings summary")
        await page.fill("#chat-tokens", "120")
        await page.click("#chat-settings summary")
        await page.fill("#chat-text", QUESTION)
        await page.click("#chat-send")
        await page.wait_for_selector("#chat-stats:has-text('tokens/s')")
    elif tab == "routing":
        await page.wait_for_timeout(20_000)  # decisions are shown from now on
        await page.focus("#routing-pools .mark[tabindex='0']")
        await page.wait_for_selector("#routing .candidates .chosen")
    elif tab == "logs":
        await page.wait_for_selector("#log-lines > div")
    await page.wait_for_timeout(1500)


async def make(out: Path, seconds: float) -> None:
    """Make all pictures."""
    with Box("dynamo") as box:
        box.dynamo("sleep", "dynamo_Coder_1")
        box.dynamo("drain", "dynamo_Vision")
        async with chromium() as browser, running(Load(box.port, 20.0)):
            wide = await open_section(browser, box, "overview")
            dark = await open_section(browser, box, "overview", scheme="dark")
            narrow = await open_section(browser, box, "overview", NARROW)
            await asyncio.sleep(seconds)
            await picture(wide, out / "web-light.png", full=True)
            await picture(dark, out / "web-dark.png", full=True)
            await picture(narrow, out / "web-400.png")
            shown = wide.locator("#tabs [role=tab]:visible")
            names = [str(await one.get_attribute("id")) for one in await shown.all()]
            for tab in (name.removeprefix("tab-") for name in names[1:]):
                page = await open_section(browser, box, tab)
                await prepare(page, tab)
                await picture(page, out / f"web-{tab}.png")
                await page.context.close()


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "docs", help="directory")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load before the first one")
    args = parser.parse_args()
    asyncio.run(make(args.out, args.seconds))


if __name__ == "__main__":
    main()

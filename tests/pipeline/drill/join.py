import json
import time

from cuda_agent.context import StageContext
from drill import journal


def run(ctx: StageContext) -> None:
    journal.write(ctx.cache, "report")
    while journal.held(ctx.cache):
        time.sleep(0.01)
    assert not hasattr(ctx.config, "critic"), "a section that the table does not list is not there"
    said = {
        path.relative_to(ctx.inputs["stages"]).as_posix(): path.read_text()
        for path in sorted(ctx.inputs["stages"].rglob("*"))
        if path.is_file()
    }
    page = ctx.outputs["report"] / "index.html"
    page.write_text((ctx.inputs["state"] / "state.txt").read_text() + (ctx.inputs["total"] / "total.txt").read_text())
    (ctx.outputs["report"] / "report.json").write_text(json.dumps(said))

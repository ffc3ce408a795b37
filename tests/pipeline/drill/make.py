from cuda_agent.context import StageContext
from cuda_agent.errors import BadConfiguration, NotGoodEnough, TryAgain
from drill import journal


def run(ctx: StageContext) -> None:
    journal.write(ctx.cache, "make")
    match journal.asked(ctx.cache, "make"):
        case "retry":
            raise TryAgain("the device was lost")
        case "gate":
            raise NotGoodEnough("explained variance is 0.1, below 0.2")
        case "config":
            raise BadConfiguration("policy.base: the folder has no tokenizer")
        case "bug":
            raise ZeroDivisionError("drill")
        case "forgetful":
            return
    (ctx.outputs["numbers"] / "n.txt").write_text(f"{ctx.config.seed} {ctx.config.collect.samples}")
    (ctx.outputs["numbers"] / "deep").mkdir()
    (ctx.outputs["numbers"] / "deep" / "m.bin").write_bytes(bytes(range(256)))
    (ctx.outputs["numbers"] / "large.bin").write_bytes(bytes(1 << 20))

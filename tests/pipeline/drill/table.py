from cuda_agent.pipeline.graph import STAGES_INPUT, Stage

STAGES = (
    Stage("make", "drill.make", outputs=("numbers",), config=("collect",)),
    Stage("train", "drill.train", inputs={"numbers": "make.numbers"}, outputs=("state",), config=("critic",)),
    Stage("side", "drill.side", inputs={"numbers": "make.numbers"}, outputs=("total",), config=("rft",), timing=True),
    Stage("twin", "drill.twin", inputs={"numbers": "make.numbers"}, outputs=("copy",)),
    Stage(
        "report",
        "drill.join",
        inputs={"state": "train.state", "total": "side.total", "stages": STAGES_INPUT},
        outputs=("report",),
    ),
)
NAME = "drill.table:STAGES"

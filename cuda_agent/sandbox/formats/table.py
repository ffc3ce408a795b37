"""Lists the solution formats, with the properties of each."""

from cuda_agent.format_names import Format
from cuda_agent.sandbox.formats import extension, first_pass, plan, python, triton
from cuda_agent.sandbox.formats.solution_format import SolutionFormat
from cuda_agent.sandbox.wire import FormatTraits

_ALL = (
    SolutionFormat(
        name="plan", entry="plan.json", folder="kernels/", build=plan.build, traits=FormatTraits(host_is_ours=True),
        needs={"cpu": "PyTorch and g++", "cuda": "PyTorch with CUDA, whose NVRTC compiles the kernels"},
        example=(("cpp", "kernels/fused.cpp"), ("json", "plan.json")),
    ),
    SolutionFormat(
        name="extension", entry="model_new.py", folder="kernels/", build=extension.build,
        traits=FormatTraits(rule="extension", own_work="function of the extension"),
        needs={"cpu": "PyTorch and g++", "cuda": "PyTorch and nvcc"},
        example=(("python", "model_new.py"), ("cpp", "kernels/fused.cpp")),
    ),
    SolutionFormat(
        name="python", entry="model_new.py", folder="", build=python.build, traits=FormatTraits(advisory=True),
        needs=dict.fromkeys(("cpu", "cuda"), "PyTorch, and what the solution itself imports"),
        example=(("python", "model_new.py"),), first_pass=first_pass.time_for_python,
    ),
    SolutionFormat(
        name="triton", entry="model_new.py", folder="", build=triton.build,
        traits=FormatTraits(rule="triton", own_work="kernel of triton.jit"),
        needs={"cpu": "PyTorch, and Triton with TRITON_INTERPRET=1", "cuda": "PyTorch with CUDA, and Triton"},
        example=(("python", "model_new.py"),), first_pass=triton.first_pass_time, environment=triton.ENVIRONMENT,
        untimed={"cpu": triton.UNTIMED},
    ),
)  # fmt: skip
FORMATS: dict[Format, SolutionFormat] = {format.name: format for format in _ALL}

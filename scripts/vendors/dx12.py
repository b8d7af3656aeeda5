"""What Microsoft's compilers said about HLSL: see hlsl.c."""

from collections import Counter

from stats import Kernel

# Bits of a container's part SFI0, which a device must have or refuse the pipeline, as D3D names them.
FEATURES = {
    0: "doubles", 1: "raw and structured buffers before shader model 5", 2: "UAVs in every stage", 3: "64 UAVs", 4: "minimum precision",
    5: "double extensions", 8: "typed UAV loads", 14: "wave operations", 15: "64-bit integers", 18: "native 16-bit types",
}
# What a kernel may ask for, by what `every_pipeline_is_written_for_both_of_microsofts_compilers` lists.
ALLOWED = {"waves": 1 << 14}
TITLES = {"cs_6_0": "DXC, shader model 6.0", "cs_6_2": "DXC, shader model 6.2", "cs_5_1": "FXC, shader model 5.1"}


class Dx12:
    """All kernels of DX12. Neither compiler spills: drivers compile its code once more."""

    name = "dx12"

    def __init__(self, folder):
        lines = (folder / "list.tsv").read_text().splitlines()
        self.listed = [line.split("\t") for line in lines]
        self.results = {}
        for out in folder.glob("out.*"):
            for line in out.read_text(errors="replace").splitlines():
                at, what, seconds, code, registers, instructions, flags, unoptimised, *message = line.split("\t")
                asks = (int(flags, 16), int(unoptimised, 16))
                self.results[int(at)] = (what, float(seconds), int(code), int(registers), int(instructions), asks, " ".join(message))
        self.kernels = []
        for at, (_, _, profile, device, pipeline, label, _) in enumerate(self.listed):
            kernel = Kernel(pipeline, label)
            kernel.compiler, kernel.profile = f"{TITLES[profile].split(',')[0].lower()}-{profile[3:].replace('_', '.')} {device}", profile
            what, _, code, registers, instructions, *_ = self.results.get(at, ("FAILED", 0, 0, 0, 0, (0, 0), ""))
            if what == "ok":
                kernel.statistics.seen = True
                kernel.statistics.values.update(code=code)
                if registers:
                    kernel.statistics.values.update(registers=f"{registers} x 4", instructions=instructions)
            self.kernels.append(kernel)

    def failures(self, _partial):
        for at, (_, _, profile, device, pipeline, label, uses) in enumerate(self.listed):
            what, *_, asks, message = self.results.get(at, ("FAILED", (0, 0), "the compiler ended before it"))
            kernel = f"{TITLES[profile]} for {device}: {pipeline} ({label})"
            if what != "ok":
                yield f"{kernel}: {message}"
            allowed = sum(ALLOWED[use] for use in uses.split())
            for how, flags in zip(("", " with -Od, as in debug builds"), asks):
                if extra := flags & ~allowed:
                    names = [FEATURES.get(bit, f"bit {bit}") for bit in range(64) if extra >> bit & 1]
                    yield f"{kernel}: the code{how} needs {', '.join(names)}, which the variant does not ask for: a device without must refuse it"

    def section(self):
        yield "\n## DX12 (Microsoft's DXC and FXC)\n"
        yield "DXC for every device with shader model 6: a card, Intel's, others that share memory. FXC for WebGPU's defaults, which is what wgpu takes where"
        yield "there is no `dxcompiler.dll`. Registers and instructions are FXC's own count; DXC's code is compiled once more by each driver. DXC compiles each kernel with"
        yield "`-Od` too, as wgpu does in debug builds; neither code needs a feature of the device that the variant does not ask for, such as doubles.\n"
        yield "| compiler | kernels | compiled | seconds | largest code | most registers |\n|---|---|---|---|---|---|"
        for profile, title in TITLES.items():
            of = [(at, kernel) for at, kernel in enumerate(self.kernels) if kernel.profile == profile]
            results = [self.results[at] for at, _ in of if at in self.results]
            compiled = sum(result[0] == "ok" for result in results)
            seconds, code = sum(result[1] for result in results), max((result[2] for result in results), default=0)
            registers = max((result[3] for result in results), default=0)
            yield f"| {title} | {len(of)} | {compiled} | {seconds:.0f} | {code} | {f'{registers} x 4' if registers else ''} |"
        by_device = Counter(kernel.compiler for kernel in self.kernels)
        yield "\nKernels by compiler and device, each text once: " + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())) + "."

#!/bin/sh
# The kernels for 64-bit ARM on a machine of another kind: `make test-arm`. Takes about two hours.
#
# Needs Debian or Ubuntu on x86-64 whose Python is 3.11 or newer, root for what it installs (g++-aarch64-linux-gnu,
# qemu-user), 2 GB of disk, and the package indexes. In build/arm it unpacks the distribution's arm64 Python and torch for
# aarch64, builds the package for ARM with the CMakeLists.txt of all, and under qemu-user
#
#   1. checks that each model of processor gets the instruction sets that it has,
#   2. runs the tests of the kernels for every instruction set (ARM_TESTS names others),
#   3. runs `pagoda demo`, whose seven questions must all be answered.
#
# Emulation says what is computed, not how fast: nothing here is timed.
set -eu
cd "$(dirname "$0")/.."
here=$PWD/build/arm
root=$here/root
python=$here/python
mkdir -p "$here/debs"

if [ ! -e "$here/.installed" ]; then
    echo "installing a compiler for aarch64 and an emulator"
    dpkg --add-architecture arm64
    apt-get update -qq
    apt-get install -y -qq g++-aarch64-linux-gnu qemu-user cmake ninja-build >/dev/null
    echo "unpacking an arm64 Python"
    minor=$(apt-cache show python3:arm64 | sed -n 's/^Depends:.*python3\.\([0-9]*\) .*/\1/p' | head -1)
    (
        cd "$here/debs"
        for name in "python3.$minor" "python3.$minor-minimal" "libpython3.$minor-minimal" "libpython3.$minor-stdlib" \
            "libpython3.$minor-dev" libc6 libstdc++6 libgcc-s1 libgomp1 libssl3 zlib1g libexpat1 libffi8 libbz2-1.0 \
            liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libcrypt1; do
            apt-get download -qq "$name:arm64" 2>/dev/null || apt-get download -qq "${name}t64:arm64" 2>/dev/null
        done
        for package in *.deb; do dpkg -x "$package" "$root"; done
    )
    cat >"$python" <<END
#!/bin/sh
# An arm64 Python. It takes this file for its name, so that processes that it starts are emulated too.
export PYTHONHOME=$root/usr PYTHONPATH=$here/site\${PYTHONPATH:+:\$PYTHONPATH}
exec qemu-aarch64 -cpu "\${ARM_CPU:-max,pauth=off}" -L $root -0 "\$0" $root/usr/bin/python3.$minor "\$@"
END
    chmod +x "$python"
    echo "installing torch and what Pagoda needs, for aarch64"
    # Newer wheels of torch for aarch64 need CUDA.
    install="${PYTHON:-python3} -m pip --disable-pip-version-check --quiet install --target $here/site --upgrade --no-compile
        --python-version 3.$minor --implementation cp --abi cp3$minor --abi abi3 --abi none --only-binary=:all:
        --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64"
    $install --no-deps 'torch==2.8.0'
    $install filelock typing-extensions sympy networkx jinja2 fsspec numpy aiohttp crc32c cyclopts llguidance msgspec \
        prometheus-client psutil pyyaml pyzmq rich safetensors tokenizers uvloop \
        hypothesis 'pytest<9.2' pytest-asyncio pytest-timeout pytest-xdist gguf
    echo "$minor" >"$here/.installed"
fi

minor=$(cat "$here/.installed")
if [ ! -e "$here/.built" ] || [ -n "$(find csrc pagoda CMakeLists.txt -newer "$here/.built" ! -path '*/__pycache__*')" ]; then
    echo "building Pagoda for ARM"
    cat >"$here/toolchain.cmake" <<END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_FLAGS_INIT "-isystem $root/usr/include")
set(Python_INCLUDE_DIR $root/usr/include/python3.$minor CACHE PATH "")
set(Python_LIBRARY $root/usr/lib/aarch64-linux-gnu/libpython3.$minor.so CACHE PATH "")
END
    rm -rf "$here/wheel" "$here"/site/pagoda "$here"/site/pagoda_llm-*
    "${PYTHON:-python3}" -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir "$here/wheel" \
        --config-settings "build-dir=$here/native" --config-settings "cmake.define.CMAKE_TOOLCHAIN_FILE=$here/toolchain.cmake" .
    python3 -m zipfile -e "$here"/wheel/*.whl "$here/site"
    # The building Python has named it for a processor of its own kind.
    mv "$here"/site/pagoda/backend/_native*.so "$here/site/pagoda/backend/_native.cpython-3$minor-aarch64-linux-gnu.so"
    touch "$here/.built"
fi

echo "1. processors and their instruction sets"
sets() {
    found=$(ARM_CPU=$1 "$python" -c 'from pagoda.backend import _native; print(*_native.instruction_sets())')
    echo "   $1: $found"
    [ "$found" = "$2" ]
}
cd "$here"
sets cortex-a53 "neon"
sets neoverse-n1 "neon neon_dotprod"
sets max,pauth=off "neon neon_dotprod neon_i8mm neon_bf16"

echo "2. tests of the kernels"
cd "$here/../.."
# shellcheck disable=SC2086
"$python" -m pytest --kernels "$here/site/pagoda/backend" -p no:cacheprovider --timeout 0 -q --tier "${TIER:-quick}" \
    ${ARM_TESTS:-tests/backend/test_cpu.py tests/backend/test_cpu_attention.py tests/backend/test_cpu_latents.py
    tests/backend/test_cpu_experts.py tests/backend/test_low_rank.py tests/backend/test_sampling.py
    tests/backend/test_invariance.py tests/backend/test_state_layers.py tests/backend/test_row_operations.py}

echo "3. pagoda demo"
cd "$here"
"$python" -c 'import sys; from pagoda.cli.start import main; sys.argv = ["pagoda", "demo"]; sys.exit(main())' | tee demo.log
grep -q '7 of 7' demo.log

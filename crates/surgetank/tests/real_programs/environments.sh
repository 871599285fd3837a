# needs: python3
# Like conda and pip: thousands of small files, links, scripts that contain the path of the directory, programs that run from it.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INDEX=1
echo "== an environment of links, and one of copies"
"$PYTHON" -m venv env
"$PYTHON" -m venv --copies --without-pip copied
./copied/bin/python -c 'import json, sys; print(json.dumps(sys.prefix != sys.base_prefix))'

echo "== a package with a program is put into it, and replaced"
wheel() {
    mkdir -p "made/greets-$1.dist-info"
    printf 'def main():\n    print("hello from %s")\n' "$1" > made/greets.py
    printf 'Metadata-Version: 2.1\nName: greets\nVersion: %s\n' "$1" > "made/greets-$1.dist-info/METADATA"
    printf 'Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n' > "made/greets-$1.dist-info/WHEEL"
    printf '[console_scripts]\ngreets = greets:main\n' > "made/greets-$1.dist-info/entry_points.txt"
    (cd made && find . -type f | sed 's|^\./||; s|$|,,|' > "greets-$1.dist-info/RECORD")
    "$PYTHON" - "$1" <<'END'
import pathlib, sys, zipfile
with zipfile.ZipFile(f"greets-{sys.argv[1]}-py3-none-any.whl", "w") as made:
    for path in sorted(pathlib.Path("made").rglob("*")):
        if path.is_file():
            made.write(path, path.relative_to("made"))
END
    rm -r made
}
wheel 1.0
wheel 2.0
./env/bin/pip install -q ./greets-1.0-py3-none-any.whl
./env/bin/greets
./env/bin/pip install -q ./greets-2.0-py3-none-any.whl
./env/bin/greets
. env/bin/activate
greets
deactivate

echo "== compiled, moved away, and counted"
./env/bin/python -m compileall -q -j 2 env/lib/python*/site-packages/pip/_internal && echo compiled
(cd env && find . -type f -name '*.py' | wc -l) | sed 's/^[1-9][0-9][0-9][0-9]*$/hundreds/'
mv env moved
[ -x moved/bin/python ] && moved/bin/python -c 'print("runs")'
# Scripts, configuration and compiled files contain the directory's name and times, so they are not compared.
rm -r moved copied greets-*.whl

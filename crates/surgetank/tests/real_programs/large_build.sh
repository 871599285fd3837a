# A real project's build: libgit2, over two hundred C files, configured, compiled, archived, linked and run. Its objects and
# archives must be the same to the byte, and files that are up to date are not rebuilt.
# needs: cmake make gcc ar
# sources: libgit2-sys
cp -r "$SOURCES/libgit2-sys/libgit2" source
# No optimisation, for speed; nothing is taken from the system that may differ.
cmake -S source -B build -DCMAKE_C_FLAGS=-O0 -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTS=OFF -DBUILD_CLI=ON -DUSE_BUNDLED_ZLIB=ON \
    -DREGEX_BACKEND=builtin -DUSE_SHA1=CollisionDetection -DUSE_SHA256=Builtin -DUSE_HTTPS=OFF -DUSE_SSH=OFF -DUSE_GSSAPI=OFF \
    >configure.log
make -C build -j2 >build.log
grep -c 'Building C object' build.log
make -C build -j2 | grep -c 'Building C object' || echo nothing to do
touch source/src/util/hash.c
make -C build -j2 | grep -c 'Building C object'
build/git2 --version
build/git2 hash-object source/README.md
ar t build/libgit2.a | wc -l
nm build/libgit2.a 2>/dev/null | grep -c ' T git_'
# The order of parallel steps, and the names of tries, vary.
rm build.log configure.log build/CMakeFiles/*.log

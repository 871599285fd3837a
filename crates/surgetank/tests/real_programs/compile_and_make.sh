# A project of a few files built by make: files that are up to date are not rebuilt, and one change rebuilds one file.
# needs: gcc make ar
mkdir -p project/source
cd project
for n in 1 2 3 4; do
    printf '#include "all.h"\nint part%d(int x) { return x * SCALE + %d; }\n' "$n" "$n" >source/part$n.c
done
printf '#define SCALE 3\nint part1(int); int part2(int); int part3(int); int part4(int);\n' >source/all.h
printf '#include <stdio.h>\n#include "all.h"\nint main(void) { printf("%%d\\n", part1(1) + part2(2) + part3(3) + part4(4)); return 7; }\n' >source/main.c
cat >Makefile <<'M'
objects := main.o part1.o part2.o part3.o part4.o
program: main.o libparts.a
	gcc -o $@ main.o libparts.a
	@echo linked
libparts.a: part1.o part2.o part3.o part4.o
	ar rcs $@ $^
%.o: source/%.c source/all.h
	gcc -O1 -c -Isource -o $@ $<
M
make -j2 program >build.log
sort build.log
./program || echo "exit $?"
make program
touch source/part2.c
make program | sort
make -q program && echo up to date
sed -i 's/SCALE 3/SCALE 5/' source/all.h
make -j2 program | wc -l
./program || echo "exit $?"
# Programs that pass files to each other.
gcc -flto -O1 -Isource -o whole source/*.c
./whole || echo "exit $?"
ls

# A repository's whole life: commits, branches, packing, cloning, checking.
# needs: git
export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.org
git config --global init.defaultBranch main
git config --global pack.threads 1
git config --global gc.cruftPacks false
git config --global advice.detachedHead false
git init -q project
cd project
for n in $(seq 60); do mkdir -p part$((n % 5)); seq $((n * 20)) >part$((n % 5))/file$n; done
git add .
git commit -q -m first
git status --short
git checkout -q -b side
for n in $(seq 5 5 60); do echo changed >>part0/file$n; done
git mv part1/file1 part2/moved
git commit -q -am second
git checkout -q main
cat part0/file5 | tail -n 1
git merge -q --no-ff -m merged side
git stash list
echo dirt >>part0/file10
git status --short
git stash -q
git status --short
git gc -q
git fsck --strict 2>&1
git log --oneline --stat | tail -n 3
cd ..
git clone -q project clone
git -C clone checkout -q HEAD~1
git -C clone status --short
git -C clone rev-parse HEAD
git -C project count-objects -v | grep -E '^(count|in-pack|packs|garbage)'
# The index holds inode numbers and times, which differ in each directory.
find . -name index -path '*/.git/*' -delete
find . -path '*/.git/logs*' -type f -exec cat {} + | wc -l

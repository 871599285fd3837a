# The JVM's two file libraries: streams and channels, mappings, moves that replace, walks, locks between processes.
# needs: java javac jar
cat >"$HOME/Work.java" <<'J'
import java.io.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.nio.file.attribute.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;

public class Work {
    public static void main(String[] words) throws Exception {
        if (words.length > 0) {
            holdsOrNot(words[0]);
            return;
        }
        Path root = Files.createDirectories(Path.of("results/deep/er"));
        Files.writeString(root.resolve("text"), "first line\nsecond line\n");
        Files.write(root.resolve("text"), List.of("third line"), StandardOpenOption.APPEND);
        System.out.println(Files.readAllLines(root.resolve("text")));

        channel(root.resolve("channel"));
        try (RandomAccessFile file = new RandomAccessFile("random", "rw")) {
            file.setLength(100_000);
            file.seek(99_000);
            file.writeUTF("near the end");
            file.seek(99_000);
            System.out.println(file.readUTF() + " " + file.length() + " " + file.getFilePointer());
        }
        moves(root);
        many();
        attributes();

        try (Stream<Path> paths = Files.walk(Path.of("."))) {
            paths.map(Path::toString).filter(path -> !path.contains("many")).sorted().forEach(System.out::println);
        }
        locks();
    }

    static void channel(Path path) throws IOException {
        Set<OpenOption> options = Set.of(StandardOpenOption.CREATE_NEW, StandardOpenOption.READ, StandardOpenOption.WRITE);
        try (FileChannel channel = FileChannel.open(path, options)) {
            ByteBuffer bytes = ByteBuffer.allocateDirect(1 << 20);
            while (bytes.hasRemaining()) bytes.putInt(bytes.position());
            bytes.flip();
            channel.write(bytes);
            channel.write(ByteBuffer.wrap("at an offset".getBytes(StandardCharsets.UTF_8)), 3_000_000);
            MappedByteBuffer map = channel.map(FileChannel.MapMode.READ_WRITE, 4096, 2_000_000);
            System.out.println(map.getInt(0) + " " + map.getInt(1_999_996));
            map.putLong(1_500_000, 0x0123456789abcdefL);
            map.force();
            ByteBuffer read = ByteBuffer.allocate(8);
            channel.read(read, 4096 + 1_500_000);
            System.out.println(Long.toHexString(read.getLong(0)) + " " + channel.size());
            channel.truncate(3_500_000);
            channel.force(true);
        }
        try (FileChannel from = FileChannel.open(path);
             FileChannel to = FileChannel.open(Path.of("copied"), StandardOpenOption.CREATE, StandardOpenOption.WRITE)) {
            System.out.println(from.transferTo(0, from.size(), to));
        }
        System.out.println(Files.mismatch(path, Path.of("copied")));
        try {
            FileChannel.open(path, options).close();
        } catch (FileAlreadyExistsException there) {
            System.out.println("already there: " + there.getMessage());
        }
    }

    static void moves(Path root) throws IOException {
        Files.writeString(Path.of("config.new"), "new");
        Files.writeString(Path.of("config"), "old");
        Files.move(Path.of("config.new"), Path.of("config"), StandardCopyOption.ATOMIC_MOVE);
        System.out.println(Files.readString(Path.of("config")) + " " + Files.exists(Path.of("config.new")));
        Files.copy(Path.of("config"), root.resolve("config"), StandardCopyOption.COPY_ATTRIBUTES);
        Files.move(root, Path.of("moved"));
        Files.createSymbolicLink(Path.of("link"), Path.of("moved/text"));
        Files.createLink(Path.of("second"), Path.of("moved/text"));
        System.out.println(Files.isSameFile(Path.of("link"), Path.of("second")) + " " + Files.size(Path.of("link")));
        Path real = Path.of("link").toRealPath();
        System.out.println(Path.of("").toAbsolutePath().relativize(real));
        Path temporary = Files.createTempFile(Path.of("."), "t", ".tmp");
        try {
            Files.delete(Path.of("moved"));
        } catch (DirectoryNotEmptyException full) {
            System.out.println("not empty: " + full.getMessage());
        }
        Files.delete(temporary);
        System.out.println(new File("moved").renameTo(new File("again")) + " " + new File("again/text").length());
    }

    /** Many files from many threads, seen by two kinds of listing. */
    static void many() throws Exception {
        Files.createDirectory(Path.of("many"));
        ExecutorService pool = Executors.newFixedThreadPool(4);
        for (int n = 0; n < 300; n++) {
            int number = n;
            pool.submit(() -> Files.writeString(Path.of("many", "file-" + number), "x".repeat(number)));
        }
        pool.shutdown();
        pool.awaitTermination(60, TimeUnit.SECONDS);
        long bytes = 0;
        try (DirectoryStream<Path> files = Files.newDirectoryStream(Path.of("many"), "file-*7")) {
            for (Path file : files) bytes += Files.size(file);
        }
        System.out.println(bytes + " " + new File("many").list().length);
        Files.walkFileTree(Path.of("many"), new SimpleFileVisitor<>() {
            @Override
            public FileVisitResult visitFile(Path file, BasicFileAttributes seen) throws IOException {
                if (seen.size() % 10 != 0) Files.delete(file);
                return FileVisitResult.CONTINUE;
            }
        });
        System.out.println(Files.list(Path.of("many")).count());
    }

    static void attributes() throws IOException {
        Path path = Path.of("config");
        Files.setPosixFilePermissions(path, PosixFilePermissions.fromString("rw-r-----"));
        Files.setLastModifiedTime(path, FileTime.fromMillis(1_000_000_000_000L));
        UserDefinedFileAttributeView own = Files.getFileAttributeView(path, UserDefinedFileAttributeView.class);
        own.write("kind", ByteBuffer.wrap("configuration".getBytes(StandardCharsets.UTF_8)));
        PosixFileAttributes seen = Files.readAttributes(path, PosixFileAttributes.class);
        System.out.println(PosixFilePermissions.toString(seen.permissions()) + " " + seen.lastModifiedTime() + " " + own.list());
        Object key = Files.readAttributes(Path.of("second"), BasicFileAttributes.class).fileKey();
        System.out.println(key.equals(Files.readAttributes(Path.of("again/text"), BasicFileAttributes.class).fileKey()));
    }

    /** What one process has locked another does not get. */
    static void locks() throws Exception {
        try (FileChannel channel = FileChannel.open(Path.of("locked"), StandardOpenOption.CREATE, StandardOpenOption.WRITE)) {
            FileLock lock = channel.lock(0, 100, false);
            other("locked");
            lock.release();
            other("locked");
        }
    }

    static void other(String path) throws Exception {
        String java = ProcessHandle.current().info().command().orElse("java");
        System.out.flush();
        new ProcessBuilder(java, "-XX:-UsePerfData", "-cp", System.getenv("HOME"), "Work", path).inheritIO().start().waitFor();
    }

    static void holdsOrNot(String path) throws IOException {
        try (FileChannel channel = FileChannel.open(Path.of(path), StandardOpenOption.WRITE)) {
            FileLock lock = channel.tryLock(50, 10, false);
            System.out.println(lock == null ? "held by another" : "free");
        }
    }
}
J
javac -d "$HOME" "$HOME/Work.java"
java -XX:-UsePerfData -cp "$HOME" Work
# Compiled in the directory and run from there, from source, from classes and from an archive of them.
cat >Small.java <<'J'
public class Small {
    public static void main(String[] words) throws Exception {
        java.net.URL from = Small.class.getResource("Small.class");
        System.out.println("from " + from.getProtocol().replaceAll("[0-9]", ""));
    }
}
J
mkdir classes
javac -d classes Small.java
java -cp classes Small
jar --create --date=2020-01-01T00:00:00Z --file small.jar -C classes .
java -jar small.jar 2>/dev/null || echo "no main class is named: $?"
java -cp small.jar Small
rm -r classes
java Small.java

// Exercises a server's service test.Wire with grpc-java on Netty. usage: java GrpcJava HOST:PORT [CERTIFICATE]
// Prints one line of JSON per check: {"name": ..., "found": ...}; the test compares.

import com.google.common.io.ByteStreams;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

public final class GrpcJava {
  private static final int[] SIZES = {0, 1, 16379, 65536, 1 << 20, 64 << 20};

  // Messages are the bytes that they are.
  private static final MethodDescriptor.Marshaller<byte[]> PLAIN = new MethodDescriptor.Marshaller<byte[]>() {
    @Override
    public InputStream stream(byte[] message) {
      return new ByteArrayInputStream(message);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return ByteStreams.toByteArray(stream);
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  };

  private final ManagedChannel channel;

  private GrpcJava(ManagedChannel channel) {
    this.channel = channel;
  }

  private static MethodDescriptor<byte[], byte[]> method(String name, MethodDescriptor.MethodType type) {
    return MethodDescriptor.<byte[], byte[]>newBuilder()
        .setType(type)
        .setFullMethodName("test.Wire/" + name)
        .setRequestMarshaller(PLAIN)
        .setResponseMarshaller(PLAIN)
        .build();
  }

  private static CallOptions within(long milliseconds) {
    return CallOptions.DEFAULT.withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
  }

  private byte[] unary(String name, byte[] message, CallOptions options) {
    return ClientCalls.blockingUnaryCall(channel, method(name, MethodDescriptor.MethodType.UNARY), options, message);
  }

  private Status statusOf(String name, byte[] message, CallOptions options) {
    try {
      unary(name, message, options);
      return Status.OK;
    } catch (StatusRuntimeException error) {
      return error.getStatus();
    }
  }

  /** What a call of many messages ended with, and what came until then. */
  private static final class Answers implements StreamObserver<byte[]> {
    final List<byte[]> messages = new ArrayList<>();
    final CountDownLatch ended = new CountDownLatch(1);
    Status status = Status.OK;

    @Override
    public void onNext(byte[] message) {
      messages.add(message);
    }

    @Override
    public void onError(Throwable error) {
      status = Status.fromThrowable(error);
      ended.countDown();
    }

    @Override
    public void onCompleted() {
      ended.countDown();
    }
  }

  private Answers stream(String name, List<byte[]> messages) throws InterruptedException {
    Answers answers = new Answers();
    ClientCall<byte[], byte[]> call =
        channel.newCall(method(name, MethodDescriptor.MethodType.BIDI_STREAMING), within(90000));
    StreamObserver<byte[]> requests = ClientCalls.asyncBidiStreamingCall(call, answers);
    for (byte[] message : messages) {
      requests.onNext(message);
    }
    requests.onCompleted();
    answers.ended.await();
    return answers;
  }

  private static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static String text(byte[] message) {
    return new String(message, StandardCharsets.UTF_8);
  }

  private static void report(String name, Object found) {
    System.out.println("{\"name\": \"" + name + "\", \"found\": " + found + "}");
  }

  private static String quoted(String text) {
    return "\"" + text.replace("\n", "\\n") + "\"";
  }

  /** The value of a member of an object of JSON, a text or an array, as it is written there. */
  private static String member(String object, String name) {
    Matcher found = Pattern.compile("\"" + name + "\": (\"[^\"]*\"|\\[[^\\]]*\\])").matcher(object);
    return found.find() ? found.group(1) : "null";
  }

  private void exercise() throws Exception {
    for (int size : SIZES) {
      byte[] message = new byte[size];
      Arrays.fill(message, (byte) 'x');
      report("unary " + size, Arrays.equals(unary("Echo", message, within(90000)), message));
    }

    // A new deadline for each, so a new value in the header table for each.
    List<Future<byte[]>> many = new ArrayList<>();
    for (int number = 0; number < 1000; number++) {
      ClientCall<byte[], byte[]> call =
          channel.newCall(method("Echo", MethodDescriptor.MethodType.UNARY), within(90000 + number));
      many.add(ClientCalls.futureUnaryCall(call, bytes("" + number)));
    }
    boolean same = true;
    for (int number = 0; number < 1000; number++) {
      same &= text(many.get(number).get()).equals("" + number);
    }
    report("many", same);

    List<byte[]> messages = new ArrayList<>();
    for (int number = 0; number < 1000; number++) {
      messages.add(bytes("message " + number));
    }
    Answers chat = stream("Chat", messages);
    same = chat.messages.size() == 1000;
    for (int number = 0; same && number < 1000; number++) {
      same = Arrays.equals(chat.messages.get(number), messages.get(number));
    }
    report("chat", same);
    report("count", stream("Count", List.of(bytes("1000 1000"))).messages.size());
    report("sum", quoted(text(stream("Sum", messages).messages.get(0))));
    Answers late = stream("FailLate", messages.subList(0, 1));
    report("late", "[" + late.messages.size() + ", " + late.status.getCode().value() + ", "
        + quoted(late.status.getDescription()) + "]");

    Status failed = statusOf("Fail", bytes("5 100 % é漢\nend"), within(90000));
    report("error", "[" + failed.getCode().value() + ", " + quoted(failed.getDescription()) + "]");
    report("unknown", statusOf("Nothing", new byte[0], within(90000)).getCode().value());
    report("deadline", statusOf("Hold", new byte[0], within(100)).getCode().value());

    Future<byte[]> held = ClientCalls.futureUnaryCall(
        channel.newCall(method("Hold", MethodDescriptor.MethodType.UNARY), within(90000)), new byte[0]);
    Thread.sleep(200);
    held.cancel(true);
    report("cancelled", held.isCancelled() ? Status.CANCELLED.getCode().value() : 0);

    Metadata sent = new Metadata();
    sent.put(Metadata.Key.of("x-text", Metadata.ASCII_STRING_MARSHALLER), "a value");
    sent.put(Metadata.Key.of("x-data-bin", Metadata.BINARY_BYTE_MARSHALLER), new byte[] {0, 1, (byte) 254, (byte) 255});
    ClientInterceptor attach = MetadataUtils.newAttachHeadersInterceptor(sent);
    String seen = text(ClientCalls.blockingUnaryCall(io.grpc.ClientInterceptors.intercept(channel, attach),
        method("Metadata", MethodDescriptor.MethodType.UNARY), within(90000), new byte[0]));
    // The handler answers with an object; a word and an array of numbers are what counts.
    report("metadata", "[" + member(seen, "x-text") + ", " + member(seen, "x-data-bin") + "]");

    byte[] compressible = bytes("compressible ".repeat(10000));
    byte[] unfolded = unary("Echo", compressible, within(90000).withCompression("gzip"));
    report("gzip", Arrays.equals(unfolded, compressible));
  }

  public static void main(String[] arguments) throws Exception {
    String[] address = arguments[0].split(":");
    NettyChannelBuilder builder = NettyChannelBuilder.forAddress(address[0], Integer.parseInt(address[1]))
        .maxInboundMessageSize(Integer.MAX_VALUE);
    if (arguments.length > 1) {
      builder.sslContext(GrpcSslContexts.forClient().trustManager(new File(arguments[1])).build());
    } else {
      builder.usePlaintext();
    }
    ManagedChannel channel = builder.build();
    try {
      new GrpcJava(channel).exercise();
    } finally {
      channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
    }
  }
}

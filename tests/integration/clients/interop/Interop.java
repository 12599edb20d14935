import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceStub;
import inference.Inference.InferParameter;
import inference.Inference.ModelInferRequest;
import inference.Inference.ModelInferResponse;
import inference.Inference.ModelStreamInferResponse;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

/**
 * Calls a frontend with grpc-java and prints one line for each check: its name, a colon, and what came of it.
 *
 * <p>java Interop TARGET. Without TLS: Debian's netty cannot negotiate HTTP/2 (ALPN).
 */
public final class Interop {
  private static ModelInferRequest tensor(String model, byte[] raw) {
    return ModelInferRequest.newBuilder()
        .setModelName(model)
        .addInputs(ModelInferRequest.InferInputTensor.newBuilder().setName("INPUT0").setDatatype("FP32").addShape(raw.length / 4))
        .addRawInputContents(ByteString.copyFrom(raw))
        .build();
  }

  private static byte[] infer(GRPCInferenceServiceBlockingStub stub, String model, byte[] raw) {
    ModelInferResponse response = stub.withDeadlineAfter(60, TimeUnit.SECONDS).modelInfer(tensor(model, raw));
    return response.getRawOutputContents(0).toByteArray();
  }

  private static ByteBuffer little(byte[] raw) {
    return ByteBuffer.wrap(raw).order(ByteOrder.LITTLE_ENDIAN);
  }

  private static byte[] four(float value) {
    return little(new byte[4]).putFloat(value).array();
  }

  private static float echoed(GRPCInferenceServiceBlockingStub stub, float value) {
    return little(infer(stub, "echo", four(value))).getFloat();
  }

  private static ModelInferRequest count(int start, long pauseMs) {
    return ModelInferRequest.newBuilder()
        .setModelName("countdown")
        .addInputs(ModelInferRequest.InferInputTensor.newBuilder().setName("start").setDatatype("INT32").addShape(1))
        .addRawInputContents(ByteString.copyFrom(little(new byte[4]).putInt(start).array()))
        .putParameters("pause_ms", InferParameter.newBuilder().setInt64Param(pauseMs).build())
        .build();
  }

  private static int left(ModelInferResponse response) {
    int place = IntStream.range(0, response.getOutputsCount()).filter(i -> response.getOutputs(i).getName().equals("left")).findFirst().getAsInt();
    return little(response.getRawOutputContents(place).toByteArray()).getInt();
  }

  /** Sends the next request after the last response to the one before; cancels, if so asked, after the first response. */
  private static final class Countdown implements ClientResponseObserver<ModelInferRequest, ModelStreamInferResponse> {
    final CompletableFuture<String> end = new CompletableFuture<>();
    private final Deque<Integer> starts;
    private final long pauseMs;
    private final boolean cancels;
    private final List<String> seen = new ArrayList<>();
    private ClientCallStreamObserver<ModelInferRequest> requests;

    Countdown(long pauseMs, boolean cancels, Integer... starts) {
      this.starts = new ArrayDeque<>(List.of(starts));
      this.pauseMs = pauseMs;
      this.cancels = cancels;
    }

    void next() {
      if (starts.isEmpty()) {
        requests.onCompleted();
      } else {
        requests.onNext(count(starts.remove(), pauseMs));
      }
    }

    @Override
    public void beforeStart(ClientCallStreamObserver<ModelInferRequest> requests) {
      this.requests = requests;
    }

    @Override
    public void onNext(ModelStreamInferResponse message) {
      if (cancels) {
        requests.cancel("enough", null);
      } else if (!message.getErrorMessage().isEmpty()) {
        seen.add(message.getErrorMessage());
        next();
      } else {
        seen.add(Integer.toString(left(message.getInferResponse())));
        if (left(message.getInferResponse()) == 0) {
          next();
        }
      }
    }

    @Override
    public void onError(Throwable error) {
      end.completeExceptionally(error);
    }

    @Override
    public void onCompleted() {
      end.complete(String.join(" ", seen));
    }
  }

  private static String run(ManagedChannel channel, Countdown countdown, long deadlineMs) throws Exception {
    GRPCInferenceServiceStub stub = GRPCInferenceServiceGrpc.newStub(channel).withDeadlineAfter(deadlineMs, TimeUnit.MILLISECONDS);
    stub.modelStreamInfer(countdown);
    countdown.next();
    try {
      return countdown.end.get();
    } catch (ExecutionException error) {
      throw (Exception) error.getCause();
    }
  }

  private static String atOnce(ManagedChannel channel) {
    var calls =
        IntStream.range(0, 100)
            .mapToObj(i -> GRPCInferenceServiceGrpc.newFutureStub(channel).modelInfer(tensor("echo", four(i))))
            .collect(Collectors.toList());
    long right = 0;
    for (int i = 0; i < calls.size(); i++) {
      try {
        right += little(calls.get(i).get().getRawOutputContents(0).toByteArray()).getFloat() == i ? 1 : 0;
      } catch (InterruptedException | ExecutionException error) {
        System.err.println(error);
      }
    }
    return Long.toString(right);
  }

  private static String words(String name, Throwable error) {
    Status status = Status.fromThrowable(error);
    boolean wordedByClient = name.equals("deadline") || name.equals("cancel");
    return status.getCode() + (wordedByClient ? "" : " " + status.getDescription());
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    GRPCInferenceServiceBlockingStub stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);
    Map<String, Callable<Object>> checks = new LinkedHashMap<>();
    checks.put("unary", () -> echoed(stub, 3.5f));
    checks.put("gzip", () -> echoed(stub.withCompression("gzip"), 3.5f));
    checks.put("big", () -> infer(stub, "echo", new byte[3 << 20]).length);
    checks.put("too large", () -> infer(stub, "echo", new byte[5 << 20]));
    checks.put("stream", () -> run(channel, new Countdown(0, false, 1, 2), 60_000));
    checks.put("stream error", () -> run(channel, new Countdown(0, false, -1), 60_000));
    checks.put("error", () -> infer(stub, "Zürich", four(1)));
    checks.put("deadline", () -> run(channel, new Countdown(1000, false, 1000), 300));
    checks.put("cancel", () -> run(channel, new Countdown(1000, true, 1000), 60_000));
    checks.put("at once", () -> atOnce(channel));
    checks.put("silence", () -> run(channel, new Countdown(2500, false, 1), 60_000));
    var out = new PrintStream(System.out, true, "UTF-8");
    for (var check : checks.entrySet()) {
      Object result;
      try {
        result = check.getValue().call();
      } catch (StatusRuntimeException error) {
        result = words(check.getKey(), error);
      }
      out.println(check.getKey() + ": " + result);
    }
    channel.shutdownNow();
  }
}

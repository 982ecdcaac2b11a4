//! The same through the daemon's socket, of guests that map a file of its mount, as restored guests do, or a plain one.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overlaybd::{LayerInfo, LayerWriter, Uuid};
use serde_json::{json, Value};

use super::guest::{Guest, Memory, Noise, PAGE};
use super::{scatter, MIB};

const SIZE: usize = 512 * MIB;
const RUNS: usize = 15;

/// A daemon, ended with this.
struct Daemon {
    process: Child,
    socket: BufReader<UnixStream>,
}

impl Daemon {
    fn start(dir: &Path) -> Self {
        let [socket, mount, cache] = ["socket", "mount", "cache"].map(|name| dir.join(name));
        std::fs::create_dir(&mount).expect("mount point");
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-blockd"));
        command.arg("--socket").arg(&socket).arg("--mount").arg(mount).arg("--cache").arg(cache);
        command.args(["--cache-bytes", "1000000", "--no-ublk"]).stderr(Stdio::null());
        let process = command.spawn().expect("a daemon");
        let deadline = Instant::now() + Duration::from_secs(10);
        let socket = loop {
            match UnixStream::connect(&socket) {
                Ok(socket) => break socket,
                Err(e) if Instant::now() > deadline => panic!("no daemon: {e}"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        Self { process, socket: BufReader::new(socket) }
    }

    /// Runs an operation; gives its result and the milliseconds it took.
    fn run(&mut self, request: &Value) -> (Value, f64) {
        let started = Instant::now();
        self.socket.get_mut().write_all(format!("{request}\n").as_bytes()).expect("sent");
        let mut line = String::new();
        self.socket.read_line(&mut line).expect("received");
        let milliseconds = started.elapsed().as_secs_f64() * 1e3;
        let reply: Value = serde_json::from_str(&line).expect("an answer");
        (reply.get("ok").unwrap_or_else(|| panic!("{reply}")).clone(), milliseconds)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("told to end");
        self.process.wait().expect("ended");
    }
}

/// Prints the table.
pub fn bench(dir: &Path) {
    println!(
        "{:48} {:>9} {:>9}   prepare  scan  read  compare  write  finish (ms)",
        "capture operation, 512 MiB", "ms", "worst"
    );
    let image = dir.join("image");
    let mut bytes = vec![0; SIZE];
    // Three quarters of a guest's memory hold something.
    Noise(9).fill(&mut bytes[..SIZE / 4 * 3]);
    std::fs::write(&image, &bytes).expect("image");
    let layer = dir.join("base");
    let info = LayerInfo { virtual_size: SIZE as u64, uuid: Uuid::random().expect("uuid"), ..LayerInfo::default() };
    let mut writer = LayerWriter::new(File::create(&layer).expect("file"), info).expect("header");
    writer.data(0, &bytes[..SIZE / 4 * 3]).expect("data");
    writer.finish().expect("layer");
    drop(bytes);

    let mut daemon = Daemon::start(dir);
    let layers = json!([{"path": layer}]);
    let (attached, _) = daemon.run(&json!({"id": 1, "op": "attach", "image": "memory", "layers": layers}));
    let served = attached["path"].as_str().expect("a path").to_owned();
    for (what, path) in [("file of the mount", Path::new(&served)), ("plain file", &image)] {
        let file = File::open(path).expect("image");
        for dirty in [10, 100] {
            for mapped in [false, true] {
                let mut memory = Memory::of_file(&file, 0, SIZE);
                if mapped {
                    let touched: u64 = memory.bytes().iter().step_by(PAGE).map(|&byte| u64::from(byte)).sum();
                    std::hint::black_box(touched);
                }
                scatter(&mut memory, dirty * MIB, 4);
                let clean = if mapped { "the rest mapped" } else { "the rest not mapped" };
                measure(
                    &format!("{what}: {dirty} MiB dirty, {clean}"),
                    &mut daemon,
                    &layers,
                    &memory,
                    &dir.join("layer"),
                );
            }
        }
    }
    let mut memory = Memory::of_file(&File::open(&served).expect("image"), 0, SIZE);
    let mut chain = vec![json!({"path": layer})];
    for i in 1..=32 {
        Noise(i).fill(&mut memory.bytes_mut()[i as usize * 4 * MIB..][..10 * MIB]);
        scatter(&mut memory, 5 * MIB, 1);
        let output = dir.join(format!("capture-{i}"));
        let guest = Guest::fork(None);
        let request = capture(&guest, &memory, &Value::Array(chain.clone()), &output);
        let (report, milliseconds) = daemon.run(&request);
        if [1, 2, 16, 32].contains(&i) {
            print_row(&format!("capture {i} of a guest that runs on"), milliseconds, milliseconds, &report);
        }
        chain.push(json!({"path": output}));
    }
    println!();
    drop(daemon);
    std::fs::remove_file(image).expect("removed");
}

fn measure(what: &str, daemon: &mut Daemon, layers: &Value, memory: &Memory, output: &Path) {
    let guest = Guest::fork(None);
    let request = capture(&guest, memory, layers, output);
    let mut runs: Vec<(Value, f64)> = (0..RUNS)
        .map(|_| {
            let result = daemon.run(&request);
            std::fs::remove_file(output).expect("removed");
            result
        })
        .collect();
    runs.sort_by(|a, b| a.1.total_cmp(&b.1));
    print_row(what, runs[RUNS / 2].1, runs[RUNS - 1].1, &runs[RUNS / 2].0);
}

fn capture(guest: &Guest, memory: &Memory, base: &Value, output: &Path) -> Value {
    json!({
        "id": 2, "op": "capture", "pid": guest.pid(), "mappings": [memory.at(0)], "base": base, "mapped": 1,
        "output": output, "size": SIZE,
    })
}

fn print_row(what: &str, milliseconds: f64, worst: f64, report: &Value) {
    print!("{what:48} {milliseconds:9.2} {worst:9.2}  ");
    for step in ["prepare", "scan", "read", "compare", "write", "finish"] {
        print!(" {:.2} ", report[format!("{step}_milliseconds")].as_f64().expect("milliseconds"));
    }
    println!();
}

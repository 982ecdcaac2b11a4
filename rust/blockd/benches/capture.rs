//! How long captures take: `cargo bench -p blockd --bench capture [-- DIRECTORY]`, the directory of the layers being the disk
//! that is measured. Medians; the processor time counts where the machine has other things to do; the last columns show where
//! the time goes, added up over the workers. The first table is of the operation as the daemon's clients know it, on guests of
//! 512 MiB, which needs root.

#![allow(missing_docs, clippy::expect_used)]

#[path = "capture/daemon.rs"]
mod daemon;
#[path = "../tests/capture/guest.rs"]
#[allow(dead_code)]
mod guest;

use std::path::Path;
use std::sync::Arc;

use blockd::capture::{capture, Base, Method, Report, Request};
use guest::{file_of, layer_of, request, stack, Guest, Memory, Noise, PAGE};
use overlaybd::Layer;

const MIB: usize = 1 << 20;
const RUNS: usize = 9;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let dir = tempfile::tempdir_in(arguments.first().map_or(".", String::as_str)).expect("directory");
    let dir = dir.path();
    daemon::bench(dir);
    println!("{:48} {:>9} {:>9} {:>9}   scan  read  compare  write  finish (ms)", "", "ms", "CPU ms", "GiB/s");

    for size in [512, 2048, 4096] {
        let clean = Image::sparse(size * MIB);
        let mut memory = clean.map();
        scatter(&mut memory, 10 * MIB, 16);
        let what = |how: &str| format!("10 MiB dirty of {size} MiB, {how}");
        bench(&what("untouched otherwise"), dir, &memory, &clean, |_| {});
        bench(&what("reading pagemap"), dir, &memory, &clean, |r| r.method = Some(Method::Pagemap));
        // Every page read once: all of the image in the process's page table.
        let touched: u64 = memory.bytes().iter().step_by(PAGE).map(|&byte| u64::from(byte)).sum();
        std::hint::black_box(touched);
        bench(&what("the rest read"), dir, &memory, &clean, |_| {});
    }
    let image = Image::sparse(2048 * MIB);
    let mut memory = image.map();
    scatter(&mut memory, 10 * MIB, 1);
    bench("10 MiB dirty of 2048 MiB, single pages", dir, &memory, &image, |_| {});
    bench("  durable", dir, &memory, &image, |r| r.durable = true);
    bench("  with digest", dir, &memory, &image, |r| r.digest = true);

    let mut memory = image.map();
    Noise(3).fill(&mut memory.bytes_mut()[..1024 * MIB]);
    bench("1 GiB dirty", dir, &memory, &image, |_| {});
    bench("  with digest", dir, &memory, &image, |r| r.digest = true);
    drop(memory);
    let mut memory = image.map();
    scatter(&mut memory, 1024 * MIB, 1);
    bench("1 GiB dirty, every other page", dir, &memory, &image, |_| {});
    drop(memory);

    let full = Image::full(1024 * MIB);
    let mut memory = full.map();
    for page in 0..1024 * MIB / PAGE {
        memory.page_mut(page)[0] ^= (page % 2) as u8;
    }
    bench("1 GiB dirty, half of it as in the base", dir, &memory, &full, |_| {});
    bench("  not compared", dir, &memory, &full, |r| r.compare = false);
    memory.bytes_mut().fill(0);
    bench("1 GiB of zeroes over data, not compared", dir, &memory, &full, |r| r.compare = false);
    drop(memory);

    let mut memory = Memory::anonymous(1024 * MIB);
    memory.advise(0..1024 * MIB, libc::MADV_HUGEPAGE);
    Noise(5).fill(memory.bytes_mut());
    bench_with("1 GiB dirty, anonymous huge pages", dir, &memory, None, |_| {});
}

struct Image {
    file: std::fs::File,
    layer: Arc<Layer>,
    len: usize,
}

impl Image {
    /// An image with a page of data in every MiB.
    fn sparse(len: usize) -> Self {
        let mut bytes = vec![0; len];
        bytes.iter_mut().step_by(MIB).for_each(|byte| *byte = 1);
        Self { file: file_of(&bytes), layer: layer_of(&bytes), len }
    }

    fn full(len: usize) -> Self {
        let mut bytes = vec![0; len];
        Noise(9).fill(&mut bytes);
        Self { file: file_of(&bytes), layer: layer_of(&bytes), len }
    }

    fn map(&self) -> Memory {
        Memory::of_file(&self.file, 0, self.len)
    }
}

/// Dirties `bytes` in runs of `pages`, spread evenly.
fn scatter(memory: &mut Memory, bytes: usize, pages: usize) {
    let runs = bytes / PAGE / pages;
    let apart = memory.bytes().len() / PAGE / runs;
    let mut noise = Noise(1);
    for run in 0..runs {
        (0..pages).for_each(|page| noise.fill(memory.page_mut(run * apart + page)));
    }
}

fn bench(what: &str, dir: &Path, memory: &Memory, image: &Image, change: impl Fn(&mut Request)) {
    let base = Base { stack: stack(std::slice::from_ref(&image.layer)), mapped: None };
    bench_with(what, dir, memory, Some(base), change);
}

fn bench_with(what: &str, dir: &Path, memory: &Memory, base: Option<Base>, change: impl Fn(&mut Request)) {
    let output = dir.join("layer");
    let guest = Guest::fork(None);
    let mut request = Request { base, ..request(&guest, &[memory.at(0)], output.clone(), memory.bytes().len()) };
    change(&mut request);
    let mut reports: Vec<(Report, f64)> = (0..RUNS)
        .map(|_| {
            let before = cpu_milliseconds();
            let report = capture(&request).expect("captured");
            let cpu = cpu_milliseconds() - before;
            std::fs::remove_file(&output).expect("removed");
            (report, cpu)
        })
        .collect();
    let mut cpu: Vec<f64> = reports.iter().map(|(_, cpu)| *cpu).collect();
    cpu.sort_by(f64::total_cmp);
    reports.sort_by_key(|(report, _)| report.times.total);
    let Report { times, dirty_pages, .. } = &reports[RUNS / 2].0;
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let rate = *dirty_pages as f64 * PAGE as f64 / f64::from(1 << 30) / times.total.as_secs_f64();
    println!(
        "{what:48} {:9.2} {:9.2} {rate:9.2}   {:.2}  {:.2}  {:.2}  {:.2}  {:.2}",
        ms(times.total),
        cpu[RUNS / 2],
        ms(times.scan),
        ms(times.read),
        ms(times.compare),
        ms(times.write),
        ms(times.finish)
    );
}

/// Processor time of this process, all threads.
fn cpu_milliseconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the structure it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
